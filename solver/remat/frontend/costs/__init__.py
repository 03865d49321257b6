"""Measures the time and workspace of operations by running them."""
