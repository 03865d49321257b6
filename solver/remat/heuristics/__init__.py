"""Schedules and bounds without a solver: eviction, local search, annealing, floors of the peak."""
