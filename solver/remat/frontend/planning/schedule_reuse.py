"""Schedules that were solved for other sizes, where they are good enough for these.

A schedule fits other sizes if the simulator says so. It is good enough if it takes at most 5% more
than any could: more recomputation is never needed at a smaller size, so what was proved to be
necessary there is necessary here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from remat.allocator.fitting import has_expandable_segments
from remat.allocator.prediction import is_on_cuda, predict, with_prediction
from remat.costs.scaling import at_other_sizes
from remat.documents.trace import Trace
from remat.frontend.planning.plan_cache import Entry
from remat.frontend.runtime.guards import Signature
from remat.limits.budget import Budget
from remat.passes.outline import outline
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution, Stats

ENOUGH = 1.05
"""Of the least time, to use a schedule again."""

KEPT = "none: nothing needs to be recomputed"
AGAIN = "the schedule solved for other sizes"


@dataclass(frozen=True)
class Known:
    """`trace` with costs from other sizes, the plans that were `solved` for the same operations
    there, and the most that any of these was allowed."""

    trace: Trace
    solved: tuple[Plan, ...]
    most_bytes: int

    @classmethod
    def of(cls, trace: Trace, entries: Iterable[Entry]) -> Known | None:
        """Of what was planned, the latest last. None where nothing is alike."""
        own = outline(trace)
        alike = [e for e in entries if e.outline == own]
        solved = [e for e in alike if not e.reused]
        plans = [e.plan for e in alike if isinstance(e.plan, Plan)]
        if not solved or (latest := solved[-1]).trace is None:
            return None
        return cls(
            at_other_sizes(trace, latest.trace, latest.nominal_bytes),
            tuple(e.plan for e in solved if isinstance(e.plan, Plan)),
            max(map(_asked_bytes, plans)),
        )

    def budget(self, asked: Budget) -> Budget:
        """A share is of the largest step that there was, and "min" is what that one needs: smaller
        ones may take it, too."""
        if asked.size_bytes is not None:
            return asked
        if asked.is_min:
            return Budget.parse(self.most_bytes) if self.is_smaller else asked
        own_bytes = asked.in_bytes(self._baseline_bytes, self.trace.library_bytes)
        assert own_bytes is not None
        return asked if own_bytes >= self.most_bytes else Budget.parse(self.most_bytes)

    @property
    def is_smaller(self) -> bool:
        """Whether larger sizes were solved for: these need no measurement of their own."""
        return any(p.baseline_peak_bytes >= self._baseline_bytes for p in self.solved)

    def plan(self, budget: Budget) -> Plan | None:
        """The fastest of what is known that fits the budget, if any does."""
        trace, graph = self.trace, self.trace.graph()
        budget_bytes = budget.in_bytes(self._baseline_bytes, trace.library_bytes)
        if budget_bytes is None:
            return None
        known = [(KEPT, Schedule.keep_all(graph)), *((AGAIN, p.schedule) for p in self.solved)]
        fitting = [(w, s) for w, s in known if _peak_bytes(trace, s) <= budget_bytes]
        if not fitting:
            return None
        why, schedule = min(fitting, key=lambda found: simulate(graph, found[1]).time_s)
        plan = Plan.of(graph, budget_bytes, Solution(schedule), self._stats(why))
        return with_prediction(plan, trace)

    def is_enough(self, plan: Plan) -> bool:
        """Whether no schedule is faster than one of these by more than 5%."""
        needed = [
            other.lower_bound or 0.0
            for other in self.solved
            if other.baseline_peak_bytes <= plan.baseline_peak_bytes
            and other.budget_bytes >= plan.budget_bytes
        ]
        return 1 + plan.overhead <= ENOUGH * (1 + max(needed, default=0.0))

    def _stats(self, why: str) -> Stats:
        return {"strategy": why, "cost_source": self.trace.cost_source}

    @cached_property
    def _baseline_bytes(self) -> int:
        graph = self.trace.graph()
        return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def outgrown(entry: Entry, entries: Mapping[Signature, Entry]) -> list[Signature]:
    """The plans for smaller sizes that recompute, and may take more now that there is this one."""
    if not isinstance(entry.plan, Plan):
        return []
    allowed_bytes = _asked_bytes(entry.plan)
    return [
        key
        for key, other in entries.items()
        if isinstance(other.plan, Plan)
        and other.outline == entry.outline
        and other.plan.overhead > 0
        and other.plan.baseline_peak_bytes < entry.plan.baseline_peak_bytes
        and _asked_bytes(other.plan) < allowed_bytes
    ]


def _asked_bytes(plan: Plan) -> int:
    """The budget, before the allocator needed some of it."""
    return int(plan.stats.get("asked_budget_bytes", plan.budget_bytes))


def _peak_bytes(traced: Trace, schedule: Schedule) -> int:
    """The peak as it will be allocated."""
    if not is_on_cuda(traced):
        return simulate(traced.graph(), schedule).peak_bytes
    return predict(traced, schedule).allocated(is_expandable=has_expandable_segments())
