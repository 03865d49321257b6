"""Models that are planned block by block: what their blocks are, what is outside, what runs."""
