"""Other orders of the operations, and schedules that do not follow the graph's.

`reordered` gives the graph in another order, for the solvers that keep to it; `least_peak_order`
and `search_schedule` find orders worth trying. `search_in_order` keeps to the graph's and only
places recomputations. Nothing here looks at a clock: work is counted in moves, and `stop` is asked
between them.
"""

from remat.heuristics.annealing.peak import least_peak_order
from remat.heuristics.annealing.reorder import first_runs, guarded, in_order, pinned, reordered
from remat.heuristics.annealing.search import search_in_order, search_schedule

__all__ = [
    "first_runs",
    "guarded",
    "in_order",
    "least_peak_order",
    "pinned",
    "reordered",
    "search_in_order",
    "search_schedule",
]
