"""`explain`: why a plan keeps or recomputes an operation, and what the other way would cost.

The other way is simulated: the same schedule with the operation's reruns taken out, or with one
put in. Every number has a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from remat.errors import UnknownName, similar_names_hint
from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.describe import SCOPE_TEXT
from remat.report.tables import align_columns
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate

_ROWS = 60


def explain(plan: PlanData, name: str) -> str:
    """The answer for an operation by name, or for a module by path.

    Where a name is both, the operation comes first. Raises `UnknownName`.
    """
    operations = plan.graph.operations
    op = next((i for i, operation in enumerate(operations) if operation.name == name), None)
    within = [i for i, o in enumerate(operations) if f"{o.module}.".startswith(f"{name}.")]
    parts: list[str] = []
    if op is not None:
        parts.append("\n".join(_operation(plan, op)))
    if name and set(within) - {op}:
        parts.append("\n".join(_module(plan, name, within)))
    if not parts:
        raise UnknownName(_unknown(plan.graph, name))
    return "\n\n".join(parts)


def without_recomputation(graph: Graph, schedule: Schedule, op: int) -> tuple[Schedule, list[int]]:
    """The schedule in which `op` runs once and its first copy is read ever after, and which run of
    the old schedule each of its runs was. Reruns of other operations that only served those of
    `op` go too."""
    unread = _unread(graph, schedule, None, frozenset())
    gone = _unread(graph, schedule, op, unread)
    kept = [run for run in range(len(schedule)) if run not in gone]
    return Schedule.of(schedule.runs[run] for run in kept), kept


def _unread(
    graph: Graph, schedule: Schedule, without: int | None, wanted: frozenset[int]
) -> frozenset[int]:
    """Reruns whose outputs nobody reads, directly or for others; those of `without` count as gone,
    the `wanted` ones as read."""
    first = _first_runs(schedule)
    gone: set[int] = set()
    read: set[int] = set()  # values whose latest copy a later run reads
    for run in range(len(schedule) - 1, -1, -1):
        o = schedule.runs[run]
        operation = graph.operations[o]
        made = [v for v in operation.outputs if v not in graph.results]
        if run != first[o] and (o == without or (run not in wanted and read.isdisjoint(made))):
            gone.add(run)
            continue
        read.difference_update(made)
        read.update(operation.inputs)
    return frozenset(gone)


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """Runs strictly between `start` and `end`, in which nobody reads an operation's output."""

    start: int
    end: int


def longest_idle_span(plan: PlanData, op: int, timeline: Timeline) -> IdleSpan | None:
    """Where the operation's output waits for its next reader: at the peak if it does so there, else
    for the longest time. None where it never waits, or is held anyway because it is a result."""
    graph, runs = plan.graph, plan.schedule.runs
    made = {v for v in graph.operations[op].outputs if v not in graph.results}
    touched = [
        run
        for run, o in enumerate(runs)
        if o == op or not made.isdisjoint(graph.operations[o].inputs)
    ]
    gaps = [IdleSpan(a, b) for a, b in pairwise(touched) if b > a + 1]
    if not made or not gaps:
        return None
    peak = timeline.peak_run
    return max(gaps, key=lambda g: (g.start < peak < g.end, _time_between(plan, g), g.end))


# -- one operation ------------------------------------------------------------------------------


def _operation(plan: PlanData, op: int) -> list[str]:
    graph = plan.graph
    operation = graph.operations[op]
    size = sum(graph.values[v].size_bytes for v in operation.outputs)
    runs = [run for run, o in enumerate(plan.schedule.runs) if o == op]
    where = f" in {operation.module}" if operation.module else ""
    timeline = plan.timeline()
    lines = [
        f"{operation.name}: {_phase(graph, op)} operation {op} of {len(graph)}{where}, "
        f"{format_seconds(operation.cost_s)}, output {format_bytes(size)}"
    ]
    if len(runs) == 1:
        lines.append(f"  kept: runs once (run {runs[0]})")
        lines += _why_kept(plan, op, timeline)
    else:
        lines.append(f"  recomputed: runs {len(runs)} times (runs {', '.join(map(str, runs))})")
        lines += _why_recomputed(plan, op, timeline)
    if operation.order_sensitive and operation.recomputable:
        lines.append(
            "  it draws random numbers or touches a buffer that changes: a rerun draws the same "
            "numbers again and leaves the buffer as it is"
        )
    return lines + _copies(plan, op, timeline)


def _why_recomputed(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """What is gained and paid, and what the plan would be without it."""
    graph = plan.graph
    schedule, was = without_recomputation(graph, plan.schedule, op)
    other = simulate(graph, schedule)
    runs = [run for run, o in enumerate(plan.schedule.runs) if o == op]
    served = len(plan.schedule) - len(schedule) - (len(runs) - 1)
    extra_s = timeline.time_s - other.time_s
    paid = f"  it costs {format_seconds(extra_s)}{_of_step(plan, extra_s)}"
    if served:
        paid += f", {served} {_plural('rerun', served)} of other operations just for it included"
    lines = [paid, *_freed(plan, op, timeline)]
    spare = plan.budget_bytes - other.peak_bytes
    peak = (
        f"kept instead, the peak would be {format_bytes(other.peak_bytes)}, "
        f"{_place(graph, schedule, other.peak_run, was[other.peak_run])}"
    )
    if spare < 0:
        lines.append(f"  {peak}: {format_bytes(-spare)} over the budget")
        return lines
    lines.append(
        f"  {peak}: it fits, with {format_bytes(spare)} to spare. Kept would be free; the solver "
        f"did not need to{_tolerance(plan, extra_s)}"
    )
    return lines


def _freed(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """Between the copies of each output: bytes that are not held, and for how long."""
    graph = plan.graph
    lines: list[str] = []
    for value in graph.operations[op].outputs:
        copies = [c for c in timeline.copies if c.value == value]
        size = graph.values[value].size_bytes
        if value in graph.results or not size:
            continue
        gaps = [IdleSpan(a.end, b.start) for a, b in pairwise(copies)]
        free_s = sum(_time_between(plan, gap) for gap in gaps)
        spans = ", ".join(f"{gap.start} and {gap.end}" for gap in gaps)
        lines.append(
            f"  it frees {format_bytes(size)} ({graph.values[value].name}) between runs {spans}, "
            f"for {format_seconds(free_s)}: {format_bytes(size * free_s)} x s"
        )
    return lines


def _tolerance(plan: PlanData, extra_s: float) -> str:
    if plan.gap is None:
        return " (its strategy proves nothing about how good a plan is)"
    if extra_s <= plan.gap * plan.time_s:
        return f" (the time saved is within the gap of {plan.gap:.3%})"
    return f" (its proof is for {SCOPE_TEXT[plan.bound_scope]} only)"


def _why_kept(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """Why it cannot run again; or what that would save and cost."""
    graph = plan.graph
    operation = graph.operations[op]
    if reason := _fixed(graph, op):
        return [f"  {reason}"]
    gap = longest_idle_span(plan, op, timeline)
    if gap is None:
        return ["  its readers follow at once: there is no run in between to free it for"]
    runs = plan.schedule.runs
    again = Schedule((*runs[: gap.end], op, *runs[gap.end :]))
    other = simulate(graph, again)
    size = sum(graph.values[v].size_bytes for v in operation.outputs if v not in graph.results)
    before = f"before run {gap.end} ({graph.operations[runs[gap.end]].name})"
    lines = [
        f"  recomputed {before} instead, it would cost {format_seconds(operation.cost_s)}"
        f"{_of_step(plan, operation.cost_s)}, and free {format_bytes(size)} after run {gap.start} "
        f"for {format_seconds(_time_between(plan, gap))}"
    ]
    worst = timeline.peak_run
    saved = timeline.peak_bytes - other.peak_bytes
    at_peak = _place(graph, plan.schedule, worst, worst)
    if saved > 0:
        lines.append(
            f"  the peak, {at_peak}, would be {format_bytes(saved)} less; the budget does not ask "
            f"for that: it has {format_bytes(plan.budget_bytes - plan.peak_bytes)} to spare"
        )
    elif saved < 0:
        lines.append(
            f"  the peak would be {format_bytes(-saved)} more: what it reads would be held for it"
        )
    elif gap.start < worst < gap.end:
        lines.append(
            f"  the peak, {at_peak}, would stay: what it reads would be held for it, or another "
            "run is as large"
        )
    else:
        lines.append(f"  the peak, {at_peak}, would stay: it does not wait there")
    return lines


def _fixed(graph: Graph, op: int) -> str:
    """Why an operation may not, or need not, run again; "" where it could."""
    operation = graph.operations[op]
    if op == graph.boundary:
        return "it marks the start of the backward pass and cannot run again"
    if not operation.recomputable:
        return (
            "it cannot run again (recomputable=False): it writes into memory that outlives it, a "
            "second run would not give the same, or it is of the backward of a compiled step"
        )
    if not operation.outputs:
        return "it has no output to free"
    if all(v in graph.results for v in operation.outputs):
        return "its output is a result (of the model, or a gradient): it is held to the end"
    if not any(graph.consumers[v] for v in operation.outputs):
        return "nothing reads its output, which is freed at once"
    return ""


def _copies(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    graph, lines = plan.graph, list[str]()
    for copy in timeline.copies:
        if copy.value not in graph.operations[op].outputs:
            continue
        value = graph.values[copy.value]
        last = (
            "held to the end (a result)"
            if copy.end >= len(plan.schedule)
            else f"freed after run {copy.end} "
            f"({graph.operations[plan.schedule.runs[copy.end]].name})"
        )
        lines.append(
            f"  {value.name} ({format_bytes(value.size_bytes)}): made in run {copy.start}, {last}"
        )
    return lines


# -- a module -----------------------------------------------------------------------------------


def _module(plan: PlanData, path: str, within: Sequence[int]) -> list[str]:
    """A table of its operations, in order; of many, those recomputed and the largest."""
    graph = plan.graph
    again = plan.schedule.recomputed(graph)

    def size(op: int) -> int:
        return sum(graph.values[v].size_bytes for v in graph.operations[op].outputs)

    def total(ops: Sequence[int]) -> tuple[str, str, str]:
        own = sum(graph.operations[op].cost_s for op in ops)
        extra = sum(graph.operations[op].cost_s * again.get(op, 0) for op in ops)
        size_bytes = sum(size(op) for op in ops)
        return format_bytes(size_bytes), format_seconds(own), format_seconds(extra)

    recomputed = sum(op in again for op in within)
    shown = sorted(sorted(within, key=lambda op: (op not in again, -size(op)))[:_ROWS])
    table = [("operation", "pass", "", "output", "time", "extra time")]
    for op in shown:
        times = again.get(op, 0)
        state = f"recomputed {times}x" if times else _held(graph, op)
        table.append((graph.operations[op].name, _phase(graph, op), state, *total([op])))
    rest = [op for op in within if op not in set(shown)]
    if rest:
        table.append((f"{len(rest)} more", "", "", *total(rest)))
    table.append(("together", "", "", *total(within)))
    return [
        f"{path}: {len(within)} {_plural('operation', len(within))}, {recomputed} recomputed",
        *align_columns(table, left=3),
    ]


def _held(graph: Graph, op: int) -> str:
    operation = graph.operations[op]
    if operation.outputs and all(v in graph.results for v in operation.outputs):
        return "kept (result)"
    if not operation.recomputable:
        return "kept (runs once only)"
    return "kept"


# -- words --------------------------------------------------------------------------------------


def _unknown(graph: Graph, name: str) -> str:
    modules: set[str] = set()
    for operation in graph.operations:
        steps = operation.module.split(".")
        modules.update(".".join(steps[: i + 1]) for i in range(len(steps)))
    known = [*(operation.name for operation in graph.operations), *sorted(modules - {""})]
    like = similar_names_hint(name, dict.fromkeys(known), lead="; near: ")
    return f"no operation and no module is called {name!r}{like}"


def _place(graph: Graph, schedule: Schedule, run: int, named: int) -> str:
    """Where a run is; `named` is the number that the reader knows it by."""
    op = schedule.runs[run]
    module = graph.operations[op].module
    return (
        f"in run {named} ({graph.operations[op].name}, {_phase(graph, op)}"
        f"{f', {module}' if module else ''})"
    )


def _phase(graph: Graph, op: int) -> str:
    return "backward" if graph.operations[op].backward else "forward"


def _of_step(plan: PlanData, time_s: float) -> str:
    if plan.baseline_time_s <= 0:
        return ""
    return f", {time_s / plan.baseline_time_s:.3%} of the step without recomputation"


def _time_between(plan: PlanData, gap: IdleSpan) -> float:
    runs = plan.schedule.runs[gap.start + 1 : gap.end]
    return sum(plan.graph.operations[op].cost_s for op in runs)


def _first_runs(schedule: Schedule) -> dict[int, int]:
    first: dict[int, int] = {}
    for run, op in enumerate(schedule.runs):
        first.setdefault(op, run)
    return first


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
