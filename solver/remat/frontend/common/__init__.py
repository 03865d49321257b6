"""Helpers that several parts of the frontend share."""
