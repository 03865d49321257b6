"""`PlanData`: a schedule with its peak, time and bound, as data.

Users get a `Plan` (`remat.plan`), which can also show, explain and save itself; the modules that
implement this need no more than `PlanData`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Self, TypeVar

from remat.errors import BudgetError, RematError
from remat.graph import Graph
from remat.limits.budget import share_of_baseline
from remat.limits.units import format_bytes
from remat.schedule import Schedule
from remat.simulate import Timeline, baseline_of, simulate
from remat.solution import BoundScope, Solution, Stat


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """The terms of a solve: the budget and the gap that were requested, the source of the costs.

    `requested_gap` is the gap at which the strategy ends, a fraction of the time.
    `requested_budget_bytes` is set if the budget was lowered so that torch's allocator stays within
    it, and `reserved_for_others_bytes` is a part of the requested budget that other users of the
    memory need. `launch_s` are the seconds in which the CPU launches the schedule's operations.
    With `cuda_graphs`, each random operation runs once, as a CUDA graph requires.
    """

    cost_source: str | None = None
    requested_gap: float | None = None
    requested_budget_bytes: int | None = None
    reserved_for_others_bytes: int | None = None
    launch_s: float | None = None
    cuda_graphs: bool | None = None


@dataclass(frozen=True, slots=True)
class SplitFigures:
    """The step without splitting, for a plan with split operations.

    `unsplit_bound` is the lower bound, as extra time over no recomputation. `unsplit_min_bytes` is
    the smallest peak known, for a budget of "min" and for one that the unsplit step does not meet.
    """

    unsplit_bound: float | None = None
    unsplit_min_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """The copies of a plan that offloads tensors.

    `host_bytes` are the most bytes on the host at once. `copies_s` are the seconds of all copies,
    of which `waiting_s`, a part of the step's time, are not hidden. The bandwidths are those that
    the plan is for. Raises `BudgetError` unless these are above zero.
    """

    host_bytes: int
    copies_s: float
    waiting_s: float
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float

    def __post_init__(self) -> None:
        for rate in (self.to_host_bytes_per_s, self.to_device_bytes_per_s):
            if not 0 < rate < math.inf:
                raise BudgetError(
                    f"the bandwidth of copies is {rate} bytes/s; it has to be above zero"
                )


@dataclass(frozen=True, slots=True)
class DeclinedOptions:
    """Reasons why a plan does without what was allowed.

    `not_split` begins with the path of the module whose operations are not split.
    """

    not_split: str | None = None
    not_offloaded: str | None = None


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """A candidate for a plan, which is a form of the step, and its result.

    `outcome` is "taken", or why the candidate was not. `peak_bytes` and `overhead`, the extra time
    over no recomputation, are None without a plan. Where `is_estimate`, the plan is by a quick
    solve, which ends with the first schedule that fits.
    """

    name: str
    outcome: str
    peak_bytes: int | None = None
    overhead: float | None = None
    is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class AllocatorPrediction:
    """Predicted peaks in bytes of a training step, with the memory allocated before it.

    `requested_peak_bytes` is the peak of the tensors' sizes. `allocated_peak_bytes` is the value
    that `torch.cuda.max_memory_allocated` will report, and `reserved_peak_bytes` the value of
    `max_memory_reserved`, which the device must have free. Both are for torch's default segments;
    the fields `expandable_...` are for `expandable_segments:True`.
    """

    requested_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    expandable_allocated_peak_bytes: int
    expandable_reserved_peak_bytes: int

    def allocated(self, *, is_expandable: bool) -> int:
        """Return the allocated peak in bytes with expandable or default segments."""
        return self.expandable_allocated_peak_bytes if is_expandable else self.allocated_peak_bytes

    def reserved(self, *, is_expandable: bool) -> int:
        """Return the reserved peak in bytes with expandable or default segments."""
        return self.expandable_reserved_peak_bytes if is_expandable else self.reserved_peak_bytes


class Status(Enum):
    """OPTIMAL if a plan is proved to be within the requested gap, else FEASIBLE."""

    OPTIMAL = "proved within the requested gap"
    FEASIBLE = "fits the budget; not proved to be within a gap of every schedule of its order"


@dataclass(frozen=True)
class PlanData:
    """A schedule and its costs.

    `budget_bytes` and the peaks include constant memory. `overhead` and `lower_bound` are extra
    time over no recomputation (0.05 is 5%). `lower_bound` is proved for `bound_scope`: "slots", the
    places where recomputation was considered, "order", every schedule of the order of the plan's
    first runs, or "all orders", every schedule. `gap` is (time - bound) / time on total time. A
    plan is OPTIMAL only by a bound for its order or for all orders. `stats` are statistics of the
    solve: keys that end in `_s` are seconds; `slots_bound`, if present, is the bound over the
    slots, like `lower_bound` a fraction of extra time; `steps` names the steps of the solve, and
    `remat.solution.STEPS` explains the keys of each.
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
    solve: Mapping[str, Stat] = field(hash=False)
    terms: PlanTerms = PlanTerms()
    split: SplitFigures | None = None
    offload: OffloadFigures | None = None
    declined: DeclinedOptions = DeclinedOptions()
    allocator: AllocatorPrediction | None = None
    candidates: tuple[CandidateResult, ...] = ()

    @classmethod
    def of(
        cls,
        graph: Graph,
        budget_bytes: int,
        solution: Solution,
        solve: Mapping[str, Stat],
        terms: PlanTerms | None = None,
    ) -> Self:
        """Return the plan for a strategy's solution, with statistics of the solve. Its schedule is
        simulated; raises `RematError` (a bug in the strategy) if it does not fit the budget."""
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
            solve=solve,
            terms=terms or PlanTerms(),
        )

    @property
    def stats(self) -> Mapping[str, Stat]:
        """The statistics of the solve, and the fields of the plan's other parts that are set."""
        parts = (getattr(self, name) for name in PLAN_PARTS)
        figures = {
            key: figure
            for part in parts
            if part is not None
            for key in (part_field.name for part_field in fields(part))
            if (figure := getattr(part, key)) is not None
        }
        return MappingProxyType({**self.solve, **figures})

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host at once; 0 if nothing is offloaded."""
        return 0 if self.offload is None else self.offload.host_bytes

    @property
    def requested_budget_bytes(self) -> int:
        """The budget before torch's allocator's excess was subtracted from it."""
        requested_bytes = self.terms.requested_budget_bytes
        return self.budget_bytes if requested_bytes is None else requested_bytes

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


PLAN_PARTS: Mapping[str, type] = {
    "terms": PlanTerms,
    "split": SplitFigures,
    "offload": OffloadFigures,
    "declined": DeclinedOptions,
    "allocator": AllocatorPrediction,
}
"""The parts of a plan whose fields are keys of its `stats`."""

P = TypeVar("P", bound=PlanData)
"""The subclass of `PlanData` that a function takes and returns."""


def _overhead(time_s: float, baseline_time_s: float) -> float:
    return time_s / baseline_time_s - 1 if baseline_time_s > 0 else 0.0


def with_reserve(plan: P, reserve_bytes: int) -> P:
    """Return the plan whose terms say that `reserve_bytes` of its budget are reserved for other
    uses; unchanged if that is 0."""
    if not reserve_bytes:
        return plan
    return replace(plan, terms=replace(plan.terms, reserved_for_others_bytes=reserve_bytes))
