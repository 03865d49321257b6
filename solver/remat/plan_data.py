"""`PlanData`: a schedule with its peak, time and bound, as data.

Users get a `Plan` (`remat.plan`), which can also show, explain and save itself; the modules that
implement this need no more than `PlanData`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self, TypeVar

from remat.errors import RematError
from remat.graph import Graph
from remat.limits.budget import share_of_baseline
from remat.limits.units import format_bytes
from remat.schedule import Schedule
from remat.simulate import Timeline, baseline_of, simulate
from remat.solution import BoundScope, Solution, Stats

RESERVED_BYTES_STAT = "reserved_for_others_bytes"
"""Key of `PlanData.stats`: bytes of the requested budget that are reserved for other uses."""

REQUESTED_GAP_STAT = "requested_gap"
"""Key of `PlanData.stats`: the gap at which the strategy ends, a fraction of the time."""


UNSPLIT_BOUND_STAT = "unsplit_bound"
"""Key of `PlanData.stats`, for a step with split operations: the lower bound without splitting, as
extra time over no recomputation."""

UNSPLIT_MIN_BYTES_STAT = "unsplit_min_bytes"
"""Key of `PlanData.stats`, for a step with split operations whose budget is "min" or was not met
without: the smallest peak known without splitting."""

HOST_BYTES_STAT = "host_bytes"
"""Key of `PlanData.stats`, for a step with offloaded tensors: the most bytes on the host at once.
"""

COPIES_S_STAT = "copies_s"
"""Key of `PlanData.stats`: the seconds of all copies between device and host."""

TO_HOST_RATE_STAT = "to_host_bytes_per_s"
"""Key of `PlanData.stats`: the bandwidth of copies to the host that the plan is for."""

TO_DEVICE_RATE_STAT = "to_device_bytes_per_s"
"""Key of `PlanData.stats`: the bandwidth of copies to the device that the plan is for."""

WAITING_S_STAT = "waiting_s"
"""Key of `PlanData.stats`: the seconds that the step waits for copies, a part of its time. All
other copies are hidden."""

IN_FLIGHT_STAT = "in_flight"
"""Key of `PlanData.stats`: the number of calls of the model before a backward."""

NOT_SPLIT_STAT = "not_split"
"""Statistic of a plan: why the operations around the logits are not split, where that was allowed.
It begins with the path of their module."""

NOT_OFFLOADED_STAT = "not_offloaded"
"""Key of `PlanData.stats`, for a step whose tensors may be offloaded, and are not: why."""


class Status(Enum):
    """OPTIMAL if a plan is proved to be within the requested gap, else FEASIBLE."""

    OPTIMAL = "proved within the requested gap"
    FEASIBLE = "fits the budget; not proved to be within a gap of every schedule of its order"


@dataclass(frozen=True)
class PlanData:
    """A schedule and its costs.

    `budget_bytes` and the peaks include constant memory. `overhead` and `lower_bound` are extra
    time over no recomputation (0.05 is 5%). `lower_bound` is proved for `bound_scope`: "slots", the
    places where recomputation was considered, "order", every schedule of the graph's order, or "all
    orders", every schedule. `gap` is (time - bound) / time on total time. A plan is OPTIMAL only by
    a bound for its order or for all orders. `stats` are statistics of the solve: keys that end in
    `_s` are seconds; `slots_bound`, if present, is the bound over the slots, like `lower_bound` a
    fraction of extra time; `steps` names the steps of the solve, and `remat.solution.STEPS`
    explains the keys of each.
    """

    status: Status
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    time_s: float
    baseline_time_s: float
    lower_bound: float | None
    bound_scope: BoundScope
    schedule: Schedule
    graph: Graph
    stats: Mapping[str, str | int | float] = field(hash=False)

    @classmethod
    def of(cls, graph: Graph, budget_bytes: int, solution: Solution, stats: Stats) -> Self:
        """Return the plan for a strategy's solution. Its schedule is simulated; raises `RematError`
        (a bug in the strategy) if it does not fit the budget."""
        timeline = simulate(graph, solution.schedule)
        baseline = baseline_of(graph)
        if timeline.peak_bytes > budget_bytes:
            raise RematError(
                f"bug: the schedule peaks at {timeline.peak_bytes:,} bytes, over its budget of "
                f"{budget_bytes:,}; please report this with the graph"
            )
        bound = solution.bound
        is_proved = solution.proved and solution.bound_scope != "slots"
        if bound is not None:
            bound = min(max(bound, graph.total_cost_s), timeline.time_s)
        return cls(
            status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
            budget_bytes=budget_bytes,
            peak_bytes=timeline.peak_bytes,
            baseline_peak_bytes=baseline.peak_bytes,
            time_s=timeline.time_s,
            baseline_time_s=baseline.time_s,
            lower_bound=None if bound is None else _overhead(bound, baseline.time_s),
            bound_scope=solution.bound_scope,
            schedule=solution.schedule,
            graph=graph,
            stats=stats,
        )

    @property
    def overhead(self) -> float:
        """Extra time over no recomputation, as a fraction of it."""
        return _overhead(self.time_s, self.baseline_time_s)

    @property
    def share(self) -> float:
        """The peak as the percentage that a budget would name it by, as a fraction (0.6 is "60%"):
        relative to the peak without recomputation, with libraries' memory on the device subtracted
        from both."""
        return share_of_baseline(
            self.peak_bytes,
            baseline_bytes=self.baseline_peak_bytes,
            library_bytes=self.graph.library_bytes,
        )

    @property
    def gap(self) -> float | None:
        """(time - proved bound) / time, on total time; None if nothing is proved."""
        if self.lower_bound is None:
            return None
        return (self.overhead - self.lower_bound) / (1 + self.overhead)

    def timeline(self) -> Timeline:
        """Simulate the schedule and return its memory run by run."""
        return simulate(self.graph, self.schedule)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.status.name}, peak={format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.baseline_peak_bytes)}, overhead={self.overhead:.2%})"
        )


P = TypeVar("P", bound=PlanData)
"""The subclass of `PlanData` that a function takes and returns."""


def _overhead(time_s: float, baseline_time_s: float) -> float:
    return time_s / baseline_time_s - 1 if baseline_time_s > 0 else 0.0


def with_reserve_stat(plan: P, reserve_bytes: int) -> P:
    """Return the plan with `reserve_bytes` of its budget noted in `stats` as reserved for other
    uses."""
    if not reserve_bytes:
        return plan
    return replace(plan, stats={**plan.stats, RESERVED_BYTES_STAT: reserve_bytes})
