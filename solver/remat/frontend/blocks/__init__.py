"""Planning block by block, for models that cannot be captured as a whole, or are sharded."""
