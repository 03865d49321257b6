"""Schedules and bounds without a solver.

- `eviction`: schedules by evicting values; `local_search`: many attempts of eviction.
- `polish`: removes needless recomputations from a schedule.
- `annealing`: simulated annealing over schedules and orders.
- `peak_bounds`: lower bounds on the peak.
"""
