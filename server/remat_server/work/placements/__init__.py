"""Where solves run: a port, and its adapters."""
