"""The search behind `Auto` and `Exact`: its steps, and the programs that they run."""
