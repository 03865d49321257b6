"""Annealing in the graph's order, as a step of a search: `heuristics.annealing.search_in_order`."""

from __future__ import annotations

import time

from remat.heuristics.annealing import search_in_order
from remat.schedule import Schedule
from remat.strategies.search.programs import MilpRunner

_MOVES_PER_OPERATION = 1_000
_MOVES_PER_S = 15_000
"""What one core does; more only means that the last round is cut off by the clock."""


def annealed(
    programs: MilpRunner, schedule: Schedule, budget_bytes: int, time_limit: float
) -> Schedule:
    """The cheapest schedule found within the budget, or `schedule` where none is better; if nothing
    fits, the one with the smallest peak. The time is in `anneal_s` of the search's stats."""
    began = time.monotonic()
    until = min(began + time_limit, programs.deadline)
    graph = programs.graph
    found = search_in_order(
        graph,
        budget_bytes,
        schedule,
        effort=min(_MOVES_PER_OPERATION * len(graph), int(time_limit * _MOVES_PER_S)),
        seed=programs.options.seed,
        stop=lambda: programs.is_cancelled() or time.monotonic() > until,
    )
    programs.clock("anneal_s", began)
    return found
