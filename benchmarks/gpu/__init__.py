"""The acceptance run: what must be true on a GPU, step by step. See `__main__`."""
