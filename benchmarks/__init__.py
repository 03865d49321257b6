"""Claims of speed and memory, each with the program that measured it and a dated result."""
