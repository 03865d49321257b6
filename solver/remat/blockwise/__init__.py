"""Planning a training step block by block, against one budget for the whole step. No torch here."""
