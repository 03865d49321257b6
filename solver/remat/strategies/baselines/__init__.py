"""Published algorithms to compare with."""
