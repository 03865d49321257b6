"""Reuse of schedules at tensor sizes that they were not solved for.

A schedule is valid at any sizes of the same operations; the simulator says what its peak and time
are there, with costs scaled from those that were measured. `ScheduleReuse` is for plans of a whole
model, `BlockScheduleCache` for plans of a block.

A whole model's schedule is good enough if it takes at most 5% longer than the fastest schedule
could. More recomputation is never needed at a smaller size: a time that was proved to be necessary
there is necessary here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from remat.allocator.budget_fitting import uses_expandable_segments
from remat.allocator.prediction import is_on_cuda, predict_allocator_peaks, with_prediction
from remat.blockwise.block_step import BlockOption
from remat.blockwise.pareto_options import option_of_schedule, pareto_optimal
from remat.costs.trace_costs import with_scaled_costs
from remat.documents.records import BaselineRecord, SplitRecord
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.planning.plan_cache import EntryKey, PlanEntry, PlanRecord
from remat.limits.budget import Budget
from remat.passes.split.splits import with_recorded_splits
from remat.passes.trace_equality import topology_key
from remat.plan import Plan
from remat.plan_data import PlanTerms
from remat.schedule import Schedule
from remat.simulate import baseline_of, simulate
from remat.solution import Solution

MAX_SLOWDOWN = 1.05
"""Largest time of a reused schedule, as a multiple of the smallest time that is possible."""

NOTHING_RECOMPUTED = "none: nothing needs to be recomputed"
REUSED_SCHEDULE = "the schedule solved for other sizes"
"""The "strategy" in the statistics of a plan that the solver did not run for."""

_MAX_SIZE_RATIO = 8.0
"""A block's schedule is reused only where all of its storages together are at most this many times
larger or smaller than those that it was solved for."""


@dataclass(frozen=True)
class ScheduleReuse:
    """The schedules that were solved for a model's step at other sizes.

    `trace` is the step at the new sizes, with costs scaled from the other sizes. `plans` were
    solved for the same operations. `max_budget_bytes` is the largest budget that any of them had.
    """

    trace: Trace
    plans: tuple[Plan, ...]
    max_budget_bytes: int

    @classmethod
    def from_entries(cls, trace: Trace, entries: Collection[PlanEntry]) -> ScheduleReuse | None:
        """Collect the schedules for a trace from the plan cache, in which the latest entry is the
        last; None where nothing was solved for the same operations.

        Where the latest of these split operations, so does the new trace.
        """
        records = [entry.record for entry in entries]
        solved = [record for record in records if not record.is_reused]
        same_step = _latest_record_of_step(trace, solved)
        if same_step is None:
            return None
        latest, split = same_step
        assert latest.trace is not None
        matching = [record for record in records if record.topology_key == latest.topology_key]
        scaled = with_scaled_costs(split, latest.trace, latest.captured_storage_bytes)
        return cls(
            _with_scaled_baseline(scaled, trace, latest.trace),
            tuple(record.plan for record in matching if not record.is_reused),
            max(record.plan.requested_budget_bytes for record in matching),
        )

    def budget_at_largest_size(self, requested: Budget) -> Budget:
        """Return the budget for the new sizes. A percentage is one of the largest step's peak so
        far, and "min" is the minimum of the largest step: smaller steps may use as much."""
        if requested.size_bytes is not None:
            return requested
        if requested.is_min:
            return Budget.parse(self.max_budget_bytes) if self.has_larger_plan else requested
        return largest_budget(requested, self.trace, self.max_budget_bytes)

    @property
    def has_larger_plan(self) -> bool:
        """True if a step of at least these sizes was solved: its measured costs are good enough."""
        return any(plan.baseline_peak_bytes >= self._baseline_bytes for plan in self.plans)

    def fastest_plan(self, budget: Budget) -> Plan | None:
        """Return the plan with the fastest schedule that fits the budget: one of those that were
        solved, or the one without recomputation. None where no schedule fits, and for "min"."""
        trace, graph = self.trace, self.trace.graph()
        budget_bytes = budget.in_bytes(self._baseline_bytes, trace.library_bytes)
        if budget_bytes is None:
            return None
        schedules = {NOTHING_RECOMPUTED: [Schedule.keep_all(graph)]}
        schedules[REUSED_SCHEDULE] = [plan.schedule for plan in self.plans]
        fitting = [
            (simulate(graph, schedule).time_s, strategy, schedule)
            for strategy, group in schedules.items()
            for schedule in group
            if _schedule_peak_bytes(trace, schedule) <= budget_bytes
        ]
        if not fitting:
            return None
        _, strategy, schedule = min(fitting, key=lambda candidate: candidate[0])
        return with_prediction(_reused_plan(trace, schedule, budget_bytes, strategy), trace)

    def is_near_optimal(self, plan: Plan) -> bool:
        """True if the lower bounds at smaller sizes prove that no schedule is faster than `plan` by
        more than 5%."""
        bounds = [
            other.lower_bound or 0.0
            for other in self.plans
            if other.baseline_peak_bytes <= plan.baseline_peak_bytes
            and other.budget_bytes >= plan.budget_bytes
        ]
        return 1 + plan.overhead <= MAX_SLOWDOWN * (1 + max(bounds, default=0.0))

    @cached_property
    def _baseline_bytes(self) -> int:
        """The peak of the step without recomputation."""
        return baseline_of(self.trace.graph()).peak_bytes


def largest_budget(requested: Budget, trace: Trace, max_budget_bytes: int) -> Budget:
    """Return the larger one of a budget in percent for this step and `max_budget_bytes`, the
    largest budget of earlier steps: smaller steps may use as much. Budgets that are no percentages
    are returned unchanged."""
    if requested.share is None:
        return requested
    baseline_bytes = baseline_of(trace.graph()).peak_bytes
    budget_bytes = requested.in_bytes(baseline_bytes, trace.library_bytes)
    assert budget_bytes is not None
    return requested if budget_bytes >= max_budget_bytes else Budget.parse(max_budget_bytes)


def superseded_entry_keys(
    entry: PlanEntry, entries: Mapping[EntryKey, PlanEntry]
) -> list[EntryKey]:
    """Return the keys of plans for smaller sizes that recompute more than they need to: with a
    relative budget they may use as much memory as `entry`, the plan of a larger step. None for a
    model that is planned block by block."""
    if entry.record.trace is None:
        return []
    budget_bytes = entry.plan.requested_budget_bytes
    return [
        key
        for key, other in entries.items()
        if other.record.topology_key == entry.record.topology_key
        and other.plan.overhead > 0
        and other.plan.baseline_peak_bytes < entry.plan.baseline_peak_bytes
        and other.plan.requested_budget_bytes < budget_bytes
    ]


@dataclass(frozen=True)
class _SolvedBlock:
    """A kind of block that was solved. `captured_storage_bytes` are the sizes of its storages as
    captured, before the trace was `measured`."""

    topology_key: object
    measured: Trace
    captured_storage_bytes: tuple[int, ...]
    plans: tuple[Plan, ...]

    def is_similar_in_size(self, trace: Trace) -> bool:
        """True if all storages of the block together are at most 8 times as large as the storages
        of `trace`, and at least an eighth."""
        size_bytes, solved_bytes = sum(trace.storage_bytes), sum(self.captured_storage_bytes)
        smaller_bytes, larger_bytes = sorted((size_bytes, solved_bytes))
        return larger_bytes <= _MAX_SIZE_RATIO * smaller_bytes


@dataclass
class BlockScheduleCache:
    """The plans of the kinds of blocks that were solved, for reuse at other sizes: a new sequence
    length costs a capture, no solve. The latest is the last."""

    _blocks: list[_SolvedBlock] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if no block was solved."""
        return not self._blocks

    def add(self, trace: Trace, measured: Trace, plans: tuple[Plan, ...]) -> None:
        """Add the plans of a block: `trace` is as captured, `measured` the same with measured costs
        and sizes."""
        block = _SolvedBlock(topology_key(trace), measured, trace.storage_bytes, plans)
        self._blocks.append(block)

    def find(self, trace: Trace) -> tuple[Trace, list[tuple[BlockOption, Plan]]] | None:
        """Return the trace with scaled costs, and the Pareto-optimal options of the block with
        their plans; None where the same operations were not solved at similar sizes."""
        key = topology_key(trace)
        for block in reversed(self._blocks):
            if block.topology_key == key and block.is_similar_in_size(trace):
                scaled = with_scaled_costs(trace, block.measured, block.captured_storage_bytes)
                graph = scaled.graph()
                options: list[tuple[BlockOption, Plan]] = []
                for plan in block.plans:
                    peak_bytes = simulate(graph, plan.schedule).peak_bytes
                    option = option_of_schedule(graph, plan.schedule)
                    options.append((option, _reused_plan(scaled, plan.schedule, peak_bytes)))
                return scaled, pareto_optimal(options)
        return None


def _reused_plan(
    trace: Trace, schedule: Schedule, budget_bytes: int, strategy: str = REUSED_SCHEDULE
) -> Plan:
    """Return a plan for this trace with a schedule that was not solved for it. `strategy` says
    where the schedule comes from."""
    terms = PlanTerms(cost_source=trace.cost_source)
    stats = {"strategy": strategy}
    return Plan.of(trace.graph(), budget_bytes, Solution(schedule), stats, terms)


def _latest_record_of_step(
    trace: Trace, records: Sequence[PlanRecord]
) -> tuple[PlanRecord, Trace] | None:
    """Return the latest plan for the same operations, and the trace with its splits; None without
    such a plan. A plan that offloads is not reused: where copies start and end depends on
    sizes."""
    split_traces: dict[tuple[SplitRecord, ...], Trace | None] = {}
    for record in reversed(records):
        if record.trace is None:
            continue
        splits = record.trace.splits
        if splits not in split_traces:
            try:
                split_traces[splits] = with_recorded_splits(trace, splits)
            except RematError:  # fewer rows than pieces, or other operations
                split_traces[splits] = None
        split = split_traces[splits]
        if split is not None and topology_key(split) == record.topology_key:
            return record, split
    return None


def _with_scaled_baseline(scaled: Trace, unsplit: Trace, solved: Trace) -> Trace:
    """Return the trace `scaled` with the peak and time of its unsplit step: the peak from
    `unsplit`, the time scaled from the trace that was solved. Unchanged if that one was not
    split."""
    if solved.unsplit is None:
        return scaled
    graph = unsplit.graph_of_sizes
    peak_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    ratio = scaled.graph().total_cost_s / (solved.graph().total_cost_s or 1.0)
    time_s = solved.unsplit.time_s * ratio
    return scaled.replace(unsplit=BaselineRecord(peak_bytes=peak_bytes, time_s=time_s))


def _schedule_peak_bytes(trace: Trace, schedule: Schedule) -> int:
    """Return the peak of a schedule in bytes: simulated, or on CUDA as torch's allocator counts
    it."""
    if not is_on_cuda(trace):
        return simulate(trace.graph(), schedule).peak_bytes
    return predict_allocator_peaks(trace, schedule).allocated(
        is_expandable=uses_expandable_segments()
    )
