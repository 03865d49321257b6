"""Runs a `Program` as a module that trains."""
