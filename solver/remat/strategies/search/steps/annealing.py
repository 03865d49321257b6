"""The step that anneals in the graph's order: `heuristics.annealing.anneal_recomputations`."""

from __future__ import annotations

from remat.heuristics.annealing import anneal_recomputations
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.search.state import SearchState

_GAP_SHARE = 0.1
"""Share of the requested gap at which annealing is not worth its time."""

_MOVES_PER_OPERATION = 1_000
_MOVES_PER_S = 15_000
"""Moves that one core tries in a second. With more, the clock ends the last round early."""


def anneal(state: SearchState, clock: Clock) -> None:
    """Add the cheapest schedule that annealing finds from the best incumbent."""
    if state.is_good_enough(state.objective, _GAP_SHARE):
        return
    graph = state.graph
    max_moves = min(float(_MOVES_PER_OPERATION * len(graph)), clock.remaining_s * _MOVES_PER_S)
    schedule = anneal_recomputations(
        graph,
        state.budget_bytes,
        state.best if state.incumbents else Schedule.keep_all(graph),
        max_moves=int(max_moves),
        seed=state.options.seed,
        stop=clock.is_set,
    )
    state.add_schedules([schedule])
