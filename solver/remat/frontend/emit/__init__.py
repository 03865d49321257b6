"""Plans for executors other than remat, under their own rules."""
