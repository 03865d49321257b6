"""Schedules and bounds without a solver.

- `eviction`: schedules by evicting values; `local_search`: many attempts of eviction.
- `next_uses`, `recompute_costs`: when values are next read, and what recomputing them costs.
- `polish`: removes needless recomputations from a schedule.
- `annealing`: simulated annealing over schedules and orders.
- `peak_bounds`: lower bounds on the peak.
"""
