"""What was solved for blocks, for calls of other sizes: a new length costs a capture, no solve.

A schedule of a block is one at any size. What it saves and takes there the simulator says, with
costs scaled from those that were measured; which ways the calls run in is chosen anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.blockwise.menu import efficient, way_of
from remat.blockwise.step import Way
from remat.costs.scaling import at_other_sizes
from remat.documents.trace import Trace
from remat.passes.outline import outline
from remat.plan import Plan
from remat.simulate import simulate
from remat.solution import Solution, Stats

AGAIN = "a schedule that was solved for other sizes"

_MOST_TIMES = 8.0
"""By how much larger or smaller all storages together may be."""


@dataclass(frozen=True)
class _Solved:
    """A kind of block. `nominal_bytes` are the sizes of its storages before it was `measured`."""

    outline: object
    measured: Trace
    nominal_bytes: tuple[int, ...]
    plans: tuple[Plan, ...]

    def is_near(self, trace: Trace) -> bool:
        now, then = sum(trace.storages), sum(self.nominal_bytes)
        return then <= _MOST_TIMES * now and now <= _MOST_TIMES * then


@dataclass
class Menus:
    """Of the kinds of blocks that were solved, the latest last."""

    _solved: list[_Solved] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was solved."""
        return not self._solved

    def add(self, trace: Trace, measured: Trace, plans: tuple[Plan, ...]) -> None:
        """`trace` as it was captured, as it was `measured`, and the plans of its ways."""
        self._solved.append(_Solved(outline(trace), measured, trace.storages, plans))

    def find(self, trace: Trace) -> tuple[Trace, list[tuple[Way, Plan]]] | None:
        """The trace with costs, and its ways, where the same operations were solved for at sizes
        that are not far from these."""
        own = outline(trace)
        for known in reversed(self._solved):
            if known.outline == own and known.is_near(trace):
                priced = at_other_sizes(trace, known.measured, known.nominal_bytes)
                graph = priced.graph()
                found: list[tuple[Way, Plan]] = []
                for plan in known.plans:
                    schedule = plan.schedule
                    peak_bytes = simulate(graph, schedule).peak_bytes
                    stats: Stats = {"strategy": AGAIN, "cost_source": priced.cost_source}
                    again = Plan.of(graph, peak_bytes, Solution(schedule), stats)
                    found.append((way_of(graph, schedule), again))
                return priced, efficient(found)
        return None
