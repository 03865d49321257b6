"""Strategies that a search starts from, and to compare with."""
