"""The commands of `remat`, one file each, and what they share."""
