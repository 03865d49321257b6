"""Real steps at small budgets, with and without pieces: `models`, `eager` and `compiled`."""
