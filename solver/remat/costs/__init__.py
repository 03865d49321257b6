"""Estimates of the time and memory of operations, without running them and without torch."""
