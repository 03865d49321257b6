"""Benchmark of the service: load, killed processes, and overhead over the library.

`__main__` is the command, `load`, `kill` and `overhead` are its sections, `jobs` their requests.
"""
