"""States of searches whose slots, options and failures a test chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tests.helpers.graphs import chain, random_stages

from remat.graph import Graph
from remat.milp import slots
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.strategies import Auto, Task
from remat.strategies.search.state import SearchState


def fail_with_bug(*_: object, **__: object) -> NoReturn:
    """Raise the error of a step with a bug."""
    raise ZeroDivisionError("as if by a bug")


EXACT = Auto(threads=1, gap=0.0, peak_gap=0.0, stall=math.inf, time_limit=300.0)


CHAIN = chain(8)
"""A chain whose smallest peak is 3 bytes, which eviction finds; without recomputation it is 9.

Within 5 bytes, eviction finds the optimum of 20 s and the bound proves it; within 4 it finds 23
s, and the bound is 21 s.
"""


STAGES = random_stages(1, 10)
"""A graph whose smallest peak is 48 bytes; eviction finds 54, and one operation needs 39."""


@dataclass
class SlotSource:
    """A source of slots, complete or few, that records its requests."""

    is_complete: bool = True
    requests: list[tuple[list[Schedule], float]] = field(default_factory=list)

    def __call__(
        self, graph: Graph, schedules: Sequence[Schedule], affordable_s: float, coarseness: int
    ) -> Slots:
        assert coarseness >= 1
        self.requests.append((list(schedules), affordable_s))
        if self.is_complete:
            return slots.build_complete_slots(graph, affordable_s)
        return slots.build_recombination_slots(graph, schedules, group_span=1)


def search_state_of(
    graph: Graph,
    slot_source: SlotSource,
    budget_bytes: int | None = None,
    options: Auto = EXACT,
    **task_fields: Any,
) -> SearchState:
    """Return the state of a search for a graph, before its first step."""
    return SearchState(Task(graph, budget_bytes, **task_fields), options, slot_source)
