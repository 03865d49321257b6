"""The choice of the tensors to offload, for a step and a budget.

A relaxation at a moment says which tensors to offload, which operations to recompute, and how much
time every plan takes at least (`remat.milp.offload_relaxation`). It is solved at the moments that
need the most memory, for the budget and for somewhat less. Each solution is rewritten into a trace
and judged by a bound and the waiting of its copies, which takes a fraction of a second; the best is
solved in full. The plan without offloading is returned where it is as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from remat.choice.stays import stays_of_cut, values_of_candidates
from remat.choice.trace_plan import TracePlan
from remat.costs.link import Link
from remat.documents.targets import ARRIVE_TARGET, RELEASE_TARGET
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.graph import Graph
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.limits.budget import Budget
from remat.milp.checkpoint_cuts import candidate_operations, solve_linear
from remat.milp.offload_relaxation import HostLimits, solve_offload_cut
from remat.passes.offload.candidates import Candidate, offload_candidates
from remat.passes.offload.copies import copy_times
from remat.passes.offload.rewriting import offload_tensors
from remat.plan import Plan
from remat.plan_data import (
    COPIES_S_STAT,
    HOST_BYTES_STAT,
    REQUESTED_GAP_STAT,
    WAITING_S_STAT,
    Status,
)
from remat.progress import Cancel
from remat.schedule import Schedule
from remat.simulate import baseline_of, simulate

MIN_BYTES = 1 << 20
"""The smallest tensor that is offloaded: smaller ones cost more launches than memory."""

_CANDIDATE_CUTS = 12
_MOMENTS = 3
"""Moments at which the relaxation is solved."""

_JUDGED_CUTS = 4
"""Cuts whose bounds judge a rewritten trace."""

_INTEGER_GAP = 0.002
_INTEGER_TIME_LIMIT_S = 2.0

_COPY_COST = 0.01
"""Seconds that each second of a copy costs where it is hidden: on an H200, copies in both
directions slow down concurrent matrix products by 2%."""

_SLACK_SHARES = (0.0, 0.03, 0.08, 0.15)
"""Shares of the memory above the constant that the relaxation leaves free, for copies on their way
and for recomputation."""

_MAX_ATTEMPTS = 3
"""Rewritten traces that are solved in full, as long as none fits the budget."""

_LEAST_GAIN = 0.001
"""The share of the step's time that offloading must save, at least."""

_MIN_SHARES = (0.3, 0.7)
"""For the budget "min": places between the largest operation's need and the smallest peak without
offloading at which a plan is tried."""

_LEAST_PEAK_GAIN = 0.05
"""For the budget "min": the share of the peak that offloading may save, at least, to be tried."""


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """The link, the bytes that may be on the host at once (None: any), and the smallest tensor that
    is offloaded."""

    link: Link
    host_bytes: int | None = None
    min_bytes: int = MIN_BYTES


@dataclass(frozen=True, slots=True)
class _Choice:
    """A trace with offloaded tensors. `score_s` is a guess of its plan's time: a bound, and the
    waiting of its copies. No plan takes less than `bound_s`, whatever it offloads. `plain_s` is the
    time without recomputation, infinity if that does not fit the budget."""

    trace: Trace
    score_s: float
    bound_s: float
    plain_s: float


def solve_with_offload(
    traces: Sequence[Trace],
    budget: Budget,
    limits: OffloadLimits,
    *,
    solve_in_full: Callable[[Trace, Budget], Plan],
    solve_without: Callable[[], TracePlan],
    cancel: Cancel | None = None,
) -> TracePlan:
    """Return the fastest plan, with tensors on the host or without.

    `traces` are forms of one measured step, such as whole and with operations split. Waiting for
    copies is part of the plan's time, as costs of the operations that wait. `solve_without` solves
    without offloading; it is not called if no such plan of `traces` can be faster. Raises its
    errors if no plan with offloading fits the budget either.
    """
    graph = traces[0].graph()
    budget_bytes = budget.in_bytes(baseline_of(graph).peak_bytes, graph.library_bytes)
    if budget_bytes is None:
        return _solve_smallest(limits, solve_in_full, solve_without, cancel)
    choices = _choices(traces, budget_bytes, limits, cancel)
    offloaded = _first_plan(choices, budget, limits.link, solve_in_full)
    if offloaded is not None and len(traces) == 1:
        least_s = min(_bound_s(trace.graph(), budget_bytes) for trace in traces)
        if offloaded.plan.time_s <= least_s:
            return offloaded
    try:
        without = solve_without()
    except (InfeasibleBudget, SolverTimeout):
        if offloaded is None:
            raise
        return offloaded
    if offloaded is None or _is_as_fast(without.plan, offloaded.plan):
        return without
    return offloaded


def _is_as_fast(without: Plan, offloaded: Plan) -> bool:
    return without.overhead <= offloaded.overhead + _LEAST_GAIN


def _solve_smallest(
    limits: OffloadLimits,
    solve_in_full: Callable[[Trace, Budget], Plan],
    solve_without: Callable[[], TracePlan],
    cancel: Cancel | None,
) -> TracePlan:
    """Return the plan with the smallest peak: without offloading, below that, or at that in less
    time."""
    without = solve_without()
    peak_bytes = without.plan.peak_bytes
    least_bytes = peak_lower_bound_bytes(without.trace.graph())
    shares = _MIN_SHARES if least_bytes < (1 - _LEAST_PEAK_GAIN) * peak_bytes else ()
    for share in (*shares, 1.0):
        size_bytes = least_bytes + int(share * (peak_bytes - least_bytes))
        choices = _choices((without.trace,), size_bytes, limits, cancel)
        budget = Budget.parse(size_bytes)
        offloaded = _first_plan(choices, budget, limits.link, solve_in_full)
        if offloaded is None:
            continue
        if size_bytes < peak_bytes or not _is_as_fast(without.plan, offloaded.plan):
            return offloaded
    return without


def _first_plan(
    choices: Sequence[_Choice],
    budget: Budget,
    link: Link,
    solve_in_full: Callable[[Trace, Budget], Plan],
) -> TracePlan | None:
    """Return the plan of the best choice that fits the budget, or that of a choice without
    recomputation if it is faster."""
    best: TracePlan | None = None
    for choice in choices[:_MAX_ATTEMPTS]:
        try:
            best = _with_waiting(choice, solve_in_full(choice.trace, budget), link)
            break
        except (InfeasibleBudget, SolverTimeout):
            continue
    plain = min(choices, key=lambda choice: choice.plain_s, default=None)
    if plain is None or plain.plain_s == float("inf"):
        return best
    if best is not None and best.plan.time_s <= plain.plain_s:
        return best
    return _with_waiting(plain, solve_in_full(plain.trace, budget), link)


def _choices(
    traces: Sequence[Trace], budget_bytes: int, limits: OffloadLimits, cancel: Cancel | None
) -> list[_Choice]:
    """Return traces with offloaded tensors, the most promising first. None if the step fits without
    recomputation."""
    choices: list[_Choice] = []
    for trace in traces:
        choices += _choices_of_trace(trace, budget_bytes, limits, cancel)
    return sorted(choices, key=lambda choice: choice.score_s)


def _choices_of_trace(
    trace: Trace, budget_bytes: int, limits: OffloadLimits, cancel: Cancel | None
) -> Iterator[_Choice]:
    graph = trace.graph()
    values = values_of_candidates(graph, offload_candidates(trace), limits.min_bytes)
    during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
    moments = candidate_operations(during_bytes, budget_bytes, _CANDIDATE_CUTS)[:_MOMENTS]
    range_bytes = max(during_bytes, default=0) - graph.constant_bytes
    bound_s = graph.total_cost_s
    seen: set[frozenset[int]] = {frozenset()}
    for moment in moments:
        host_limits = _limits_at(graph, moment, values, limits)
        cut = solve_offload_cut(graph, budget_bytes, moment, host_limits)
        if cut is not None:
            bound_s = max(bound_s, cut.bound_s)
    for recomputes in (True, False):
        for moment, slack in product(moments, _SLACK_SHARES):
            if cancel is not None and cancel.is_set():
                return
            cut = solve_offload_cut(
                graph,
                budget_bytes - int(slack * range_bytes),
                moment,
                _limits_at(graph, moment, values, limits),
                gap=_INTEGER_GAP,
                copy_cost=_COPY_COST,
                time_limit=_INTEGER_TIME_LIMIT_S,
                recomputes=recomputes,
            )
            if cut is None or cut.offloaded in seen:
                continue
            seen.add(cut.offloaded)
            planned = stays_of_cut(trace, cut, values, budget_bytes)
            offloaded = offload_tensors(trace, planned.stays, limits.link, planned.recomputed_s)
            choice = _judged(offloaded, planned.recomputed_s, bound_s, budget_bytes, limits.link)
            yield choice
            expected_s = choice.score_s if recomputes else choice.plain_s
            if expected_s <= bound_s * (1 + _LEAST_GAIN):
                break


def _judged(
    trace: Trace,
    recomputed_s: dict[str, float],
    bound_s: float,
    budget_bytes: int,
    link: Link,
) -> _Choice:
    """Return a trace with offloaded tensors as a choice."""
    graph = trace.graph()
    score_s = _bound_s(graph, budget_bytes) + _expected_waiting_s(trace, recomputed_s, link)
    plain_s = float("inf")
    keep_all = Schedule.keep_all(graph)
    if simulate(graph, keep_all).peak_bytes <= budget_bytes:
        plain_s = copy_times(trace, keep_all.runs, link).step_s
    return _Choice(trace, score_s, bound_s, plain_s)


def _limits_at(
    graph: Graph, moment: int, values: dict[int, Candidate], limits: OffloadLimits
) -> HostLimits:
    """Return the limits of copies at a moment: only values that no operation of the forward reads
    from then on can be on the host."""
    allowed = {
        v
        for v in values
        if all(op < moment or graph.operations[op].backward for op in graph.consumers[v])
    }
    return HostLimits(limits.link, limits.host_bytes, frozenset(allowed))


def _expected_waiting_s(trace: Trace, recomputed_s: dict[str, float], link: Link) -> float:
    """Return the time that a step waits for copies if recomputations take this time before
    operations."""
    nodes = tuple(
        node.model_copy(update={"cost_s": (node.cost_s or 0.0) + recomputed_s[node.name]})
        if node.name in recomputed_s
        else node
        for node in trace.nodes
    )
    longer = trace.replace(nodes=nodes)
    return copy_times(longer, range(len(longer.operations)), link).waiting_s


def _bound_s(graph: Graph, budget_bytes: int) -> float:
    """Return a lower bound on the time of every schedule of a graph within a budget, from a few
    cuts; infinity if one shows that none fits."""
    during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
    bound_s = graph.total_cost_s
    for op in candidate_operations(during_bytes, budget_bytes, _CANDIDATE_CUTS)[:_JUDGED_CUTS]:
        cut = solve_linear(graph, budget_bytes, [op])
        bound_s = float("inf") if cut is None else max(bound_s, cut.bound_s)
    return bound_s


def _with_waiting(choice: _Choice, plan: Plan, link: Link) -> TracePlan:
    """Return the plan of a choice with the simulated waiting for copies as the cost of operations
    that wait, and the bound that holds whatever is offloaded."""
    times = copy_times(choice.trace, plan.schedule.runs, link)
    nodes = tuple(
        node.model_copy(update={"cost_s": times.waits_s.get(node.name, 0.0)})
        if node.target in (RELEASE_TARGET, ARRIVE_TARGET)
        else node
        for node in choice.trace.nodes
    )
    trace = choice.trace.replace(nodes=nodes)
    timeline = simulate(trace.graph(), plan.schedule)
    bound_s = min(choice.bound_s, timeline.time_s)
    requested_gap = plan.stats.get(REQUESTED_GAP_STAT, 0.0)
    is_proved = timeline.time_s - bound_s <= float(requested_gap) * timeline.time_s
    changed = replace(
        plan,
        graph=trace.graph(),
        time_s=timeline.time_s,
        lower_bound=bound_s / plan.baseline_time_s - 1 if plan.baseline_time_s else 0.0,
        bound_scope="order",
        status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
        stats={
            **plan.stats,
            HOST_BYTES_STAT: times.host_bytes,
            COPIES_S_STAT: times.copying_s,
            WAITING_S_STAT: times.waiting_s,
        },
    )
    return TracePlan(trace, changed)
