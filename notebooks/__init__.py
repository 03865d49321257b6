"""Notebooks to read and to run; see README.md."""
