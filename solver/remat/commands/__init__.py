"""The commands of `remat`, and what they share."""
