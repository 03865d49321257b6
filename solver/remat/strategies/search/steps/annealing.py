"""The step that anneals in the graph's order: `heuristics.annealing.search_in_order`."""

from __future__ import annotations

from remat.heuristics.annealing import search_in_order
from remat.schedule import Schedule
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known

_WELL = 0.1
"""Of the gap: no more is wanted."""

_MOVES_PER_OPERATION = 1_000
_MOVES_PER_S = 15_000
"""What one core does; more only means that the last round is cut off by the clock."""


def anneal(known: Known, clock: Clock) -> None:
    """The cheapest schedule that annealing finds, from the best that is known."""
    if known.is_enough(known.objective, _WELL):
        return
    graph = known.graph
    found = search_in_order(
        graph,
        known.budget_bytes,
        known.best if known.rated else Schedule.keep_all(graph),
        effort=int(min(float(_MOVES_PER_OPERATION * len(graph)), clock.left_s * _MOVES_PER_S)),
        seed=known.options.seed,
        stop=clock.is_over,
    )
    known.offer([found])
