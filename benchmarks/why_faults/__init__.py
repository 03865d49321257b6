"""Faults of training scripts, planted on purpose, and what `remat why` says of them."""
