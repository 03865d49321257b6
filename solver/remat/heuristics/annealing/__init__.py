"""Simulated annealing over schedules, in the graph's order or in others.

Nothing here looks at a clock: work is counted in moves, and `stop` is called between them.
"""
