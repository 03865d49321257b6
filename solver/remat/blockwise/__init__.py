"""A step whose blocks are planned one by one, against one budget for the whole."""
