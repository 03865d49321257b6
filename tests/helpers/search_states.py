"""Searches whose slots, options and failures a test chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tests.helpers.graphs import chain, uneven_stages

from remat.graph import Graph
from remat.milp import slots
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.strategies import Auto, Task
from remat.strategies.search.state import SearchState


def failing(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("as if by a bug")


EXACT = Auto(threads=1, gap=0.0, peak_gap=0.0, stall=math.inf, time_limit=300.0)


CHAIN = chain(8)
"""3 bytes are the least, and eviction finds them; it is 9 without recomputation. Within 5, eviction
finds the best of 20 s and the bound says so; within 4 it is 23 s, and the bound is 21 s."""


STAGES = uneven_stages(1, 10)
"""48 bytes are the least; eviction finds 54, and some operation alone needs 39."""


@dataclass
class SlotSource:
    """Slots that are offered, all or few, with what they were asked for."""

    is_complete: bool = True
    requests: list[tuple[list[Schedule], float]] = field(default_factory=list)

    def __call__(
        self, graph: Graph, schedules: Sequence[Schedule], affordable_s: float, _: int
    ) -> Slots:
        self.requests.append((list(schedules), affordable_s))
        if self.is_complete:
            return slots.complete(graph, affordable_s)
        return slots.recombined(graph, schedules, region=1)


def search_state_of(
    graph: Graph,
    slot_source: SlotSource,
    budget_bytes: int | None = None,
    options: Auto = EXACT,
    **task_fields: Any,
) -> SearchState:
    return SearchState(Task(graph, budget_bytes, **task_fields), options, slot_source)
