"""Simulated annealing over schedules, in the graph's order or in others.

- `reorder`: a graph in another order, and graphs in which every topological order is allowed.
- `peak_order`: an order with a small peak, without recomputation.
- `schedule_search`: schedules within a budget, in any order or with recomputations only.
- `anneal`: the annealing loop; `moves`: the random changes that it tries.
- `schedule_profile`: the changing sequence with its memory and time; `placement`: queries on it.

Nothing here looks at a clock: work is counted in moves, and `stop` is called between them.
"""

from remat.heuristics.annealing.orders import (
    first_run_order,
    reindex_schedule,
    reorder_graph,
    small_peak_order,
    with_fixed_order,
    with_order_constraints,
)
from remat.heuristics.annealing.schedule_search import anneal_recomputations, anneal_schedule

__all__ = [
    "anneal_recomputations",
    "anneal_schedule",
    "first_run_order",
    "reindex_schedule",
    "reorder_graph",
    "small_peak_order",
    "with_fixed_order",
    "with_order_constraints",
]
