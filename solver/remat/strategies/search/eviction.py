"""The steps that find schedules without a program over slots: by eviction, with the advice of the
relaxation at checkpoint cuts, and by the quick baselines.

HiGHS releases Python's global lock while it runs, so a thread suffices to use a second core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.graph import Graph
from remat.heuristics.eviction import EvictionAdvice, EvictionRule
from remat.heuristics.local_search import (
    ADVICE_RULES,
    run_limit,
    schedules_within_budget,
    smallest_peak_schedule,
)
from remat.milp.retention_advice import RetentionAdvisor
from remat.progress import Clock
from remat.schedule import Schedule
from remat.strategies.baselines.quick import quick_baseline_schedules
from remat.strategies.search.state import SearchState

_GAP_SHARE, _GAP_SHARE_TIME = 0.1, 0.03
"""Eviction continues to this share of the gap, for up to this share of the time limit."""

_SMALL_VALUES_TIME_SHARE = 0.5
"""Share of the step's time for attempts with small values reserved."""

_MIN_RUNS, _RUNS_PER_OPERATION = 20_000, 30
"""Limit of the operations that eviction runs, absolute or in multiples of the graph's, whichever is
more (see `run_limit`). The steps that follow find further improvements sooner."""

_LARGE_GRAPH, _PEAK_GAP_SHARE = 5_000, 0.4
"""In graphs of so many operations, where an attempt takes a second, the search for the smallest
peak ends within this share of the requested gap above the bound."""

_ADVISED_RUNS_PER_OPERATION = 10
"""The same limit for following the first advice only: half a dozen attempts."""


def evict_by_advice(state: SearchState, clock: Clock) -> None:
    """Add schedules that follow the checkpoint cuts' first advice.

    If one of them is within the gap, no memory is reserved for small values afterwards: it may need
    the budget to the last byte.
    """
    max_runs = _ADVISED_RUNS_PER_OPERATION * len(state.graph)
    state.add_schedules(
        _schedules_by_eviction(state, state.graph, state.budget_bytes, clock, max_runs)
    )
    if state.is_within_gap:
        state.small_values_share = 0.0


_FIRST_RUNS_PER_OPERATION = 3
"""The same limit for the smallest peak after the deadline, without a schedule: a few attempts, a
second in graphs of 10,000 operations."""

_LEAST_GRACE_S = 10.0
"""Without a schedule, eviction may exceed the deadline by this many seconds, or by the time limit
if that is longer, so that slow machines get a plan. In a long recurrent network an attempt that
fails takes half a minute."""

_CANCEL_GRACE_S = 2.0
"""Seconds that eviction may take without a schedule although the caller cancelled: small graphs
get a schedule even then."""


def evict_for_cost(state: SearchState, clock: Clock) -> None:
    """Add schedules that follow the checkpoint cuts' advice, and others around the best of them.

    If some fit with small values reserved, this step and those that follow work without those
    values.
    """
    available_bytes = state.budget_bytes - state.graph.constant_bytes
    reduced_graph, small_bytes = reserve_small_values(
        state.graph, int(state.small_values_share * available_bytes)
    )
    if small_bytes:
        reduced_bytes = state.budget_bytes - small_bytes
        time = clock.limited_to_share(_SMALL_VALUES_TIME_SHARE)
        if schedules := _schedules_by_eviction(state, reduced_graph, reduced_bytes, time):
            state.stats["small_values_bytes"] = small_bytes
            state.switch_graph(reduced_graph, reduced_bytes)
            state.add_schedules(schedules)
            return
    state.add_schedules(_schedules_by_eviction(state, state.graph, state.budget_bytes, clock))


def _schedules_by_eviction(
    state: SearchState,
    graph: Graph,
    budget_bytes: int,
    clock: Clock,
    max_runs: int | None = None,
) -> list[Schedule]:
    """Return schedules of a graph within a budget that eviction finds from the incumbents and the
    advice; it may exceed the time as long as there is none."""
    advisor = state.advisor
    grace_s = max(_LEAST_GRACE_S, state.options.time_limit)

    def must_stop() -> bool:
        is_cancelled = clock.is_cancelled() and clock.elapsed_s > _CANCEL_GRACE_S
        return is_cancelled or clock.remaining_s < -grace_s

    def is_good_enough(time_s: float) -> bool:
        is_late = clock.elapsed_s > _GAP_SHARE_TIME * state.options.time_limit
        return state.is_good_enough(time_s, 1.0 if is_late else _GAP_SHARE)

    candidates = schedules_within_budget(
        graph,
        budget_bytes,
        incumbents=state.schedules,
        advice=() if advisor is None else advisor.advice(),
        is_good_enough=is_good_enough,
        max_runs=max_runs or run_limit(graph, _RUNS_PER_OPERATION, _MIN_RUNS),
        stop=clock.is_set,
        must_stop=must_stop,
    )
    return [candidate.schedule for candidate in candidates]


def evict_for_peak(state: SearchState, clock: Clock) -> None:
    """Add the schedule with the smallest peak that eviction finds. It ends at the target of the
    search or, without one, at the lower bound of the peak."""
    target_bytes = state.target_bytes
    if target_bytes is None:
        target_bytes = state.peak_lower_bound_bytes
        if len(state.graph) >= _LARGE_GRAPH:
            target_bytes = int(target_bytes * (1 + _PEAK_GAP_SHARE * state.options.peak_gap))
    if not state.incumbents and clock.is_set():
        first = smallest_peak_schedule(
            state.graph,
            target_bytes=target_bytes,
            max_runs=_FIRST_RUNS_PER_OPERATION * len(state.graph),
            stop=clock.is_cancelled,
        )
        state.add_schedules([first.schedule])
        return
    start = state.best if state.incumbents else None
    smallest = smallest_peak_schedule(
        state.graph, target_bytes=target_bytes, start=start, stop=clock.is_set
    )
    state.add_schedules([smallest.schedule])


def reserve_small_values(graph: Graph, max_bytes: int) -> tuple[Graph, int]:
    """Return the graph with its smallest values at no bytes, and the bytes of all these values.
    They are as many as `max_bytes` hold together, without results.

    A schedule that fits the returned graph in a budget reduced by these bytes fits the given graph
    in the full budget: there is never more than one live copy of a value that is no result.
    """
    reserved_bytes = 0
    small: set[int] = set()
    by_size = sorted((value.size_bytes, v) for v, value in enumerate(graph.values))
    for size_bytes, v in by_size:
        if v in graph.results:
            continue
        if reserved_bytes + size_bytes > max_bytes:
            break
        reserved_bytes += size_bytes
        small.add(v)
    values = tuple(
        replace(value, size_bytes=0) if v in small else value
        for v, value in enumerate(graph.values)
    )
    # Outputs without bytes have no memory to write into: not counting the overwrite is safe.
    operations = tuple(
        replace(o, overwrites=()) if small.intersection(o.outputs) else o for o in graph.operations
    )
    return replace(graph, values=values, operations=operations), reserved_bytes


_PROGRAM_TIME_LIMIT_S = 20.0

_EVICTION_RUNS_PER_OPERATION = 12
"""Operations that eviction may run per piece of advice, in multiples of the graph's."""


def relax_at_checkpoint_cuts(state: SearchState, clock: Clock) -> None:
    """Solve the relaxation at the checkpoint cuts with the highest memory, for a lower bound on
    all schedules of the order and for advice to eviction."""
    budget_bytes = state.task.budget_bytes
    assert budget_bytes is not None
    state.advisor = RetentionAdvisor(
        state.task.graph,
        budget_bytes,
        gap=state.options.gap,
        clock=state.clock,
        stop=clock.is_set,
    )


def add_checkpoint_cuts(state: SearchState, clock: Clock) -> None:
    """Solve programs over more and more checkpoint cuts, and add schedules that follow their
    advice. Nothing if the relaxation was not solved before."""
    advisor = state.advisor
    if advisor is None:
        return
    for advice in advisor.advice_from_more_cuts(
        lambda: state.best, _PROGRAM_TIME_LIMIT_S, clock.is_set
    ):
        follow_advice(state, advice, clock, _EVICTION_RUNS_PER_OPERATION)
        if clock.is_set():
            return


def follow_advice(
    state: SearchState,
    advice: EvictionAdvice,
    clock: Clock,
    runs_per_operation: int,
    rules: Sequence[EvictionRule] = ADVICE_RULES,
) -> None:
    """Add schedules that follow one piece of advice under these rules of eviction. Each attempt may
    run `runs_per_operation` times as many operations as the graph has."""
    candidates = schedules_within_budget(
        state.graph,
        state.budget_bytes,
        incumbents=state.schedules,
        advice=[advice],
        rules=rules,
        is_good_enough=state.is_good_enough,
        max_runs=runs_per_operation * len(state.graph),
        stop=clock.is_set,
    )
    state.add_schedules(candidate.schedule for candidate in candidates)


def run_quick_baselines(state: SearchState, clock: Clock) -> None:
    """Add the schedules of the quick baselines within the budget, or with their smallest peaks."""
    state.add_schedules(quick_baseline_schedules(state.task.graph, state.task.budget_bytes, clock))
