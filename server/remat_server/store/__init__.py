"""The store: the queue and the truth, in SQLite or PostgreSQL."""
