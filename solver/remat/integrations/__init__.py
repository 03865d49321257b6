"""remat where training happens: one file for each package, imported by nobody else."""
