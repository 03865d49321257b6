"""Inductor: what it will run for a graph, and how it is made to run what was planned."""
