"""`explain`: why a plan retains or recomputes an output, and what the alternative would cost.

The alternative is simulated: the same schedule without the recomputations of the operation, or with
one more. Every number has a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from remat.errors import UnknownName, similar_names_hint, wrong_type
from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import offloaded_values
from remat.plan_data import PlanData
from remat.report.operation_lines import module_lines, operation_labels, phase, plural
from remat.report.plan_report import SCOPE_TEXT, host_lines
from remat.report.report import fold_layer_numbers
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate


def explain(plan: PlanData, name: str) -> str:
    """Return the explanation for an operation, given its name, or a module, given its path.

    A path may have `*` for the numbers of layers, as in the tables of `describe`. If the name is
    both, the operation comes first. Raises `UnknownName`, and TypeError for another object.
    """
    if not isinstance(name, str):
        remedy = "pass text, such as plan.graph.operations[0].name"
        raise wrong_type("explain", "the name of an operation or of a module", name, remedy)
    operations = plan.graph.operations
    op = next((i for i, operation in enumerate(operations) if operation.name == name), None)
    in_module = [i for i, o in enumerate(operations) if _is_in_module(o.module, name)]
    parts: list[str] = []
    if op is not None:
        parts.append("\n".join(_explain_operation(plan, op)))
    if name and set(in_module) - {op}:
        parts.append("\n".join(module_lines(plan, name, in_module)))
    pieces = [i for i, o in enumerate(operations) if name and o.piece_of == name]
    if pieces:
        parts.append("\n".join(module_lines(plan, name, pieces)))
    if not parts:
        raise UnknownName(_unknown_name_text(plan.graph, name))
    return "\n\n".join(parts)


def _is_in_module(module: str, path: str) -> bool:
    """True if `module` is the module at `path`, or one of its submodules; `path` may have `*` for
    numbers."""
    return any(f"{m}.".startswith(f"{path}.") for m in (module, fold_layer_numbers(module)))


def without_recomputation(graph: Graph, schedule: Schedule, op: int) -> tuple[Schedule, list[int]]:
    """Return the schedule without the recomputations of `op`, and the run of the old schedule that
    each of its runs was.

    Readers of a recomputed copy read the first copy instead. Recomputations of other operations
    that only provided inputs for them are removed too.
    """
    unread = _unread_recomputations(graph, schedule, None, frozenset())
    removed = _unread_recomputations(graph, schedule, op, unread)
    remaining = [run for run in range(len(schedule)) if run not in removed]
    return Schedule.of(schedule.runs[run] for run in remaining), remaining


def _unread_recomputations(
    graph: Graph, schedule: Schedule, removed_op: int | None, excluded_runs: frozenset[int]
) -> frozenset[int]:
    """Return the runs that recompute outputs which no other run reads, or only such runs.

    All recomputations of `removed_op` are among them; `excluded_runs` are not.
    """
    first = _first_run_of_operations(schedule)
    unread: set[int] = set()
    read: set[int] = set()  # values whose latest copy a later run reads
    for run in range(len(schedule) - 1, -1, -1):
        op = schedule.runs[run]
        operation = graph.operations[op]
        outputs = [v for v in operation.outputs if v not in graph.results]
        is_unread = run not in excluded_runs and read.isdisjoint(outputs)
        if run != first[op] and (op == removed_op or is_unread):
            unread.add(run)
            continue
        read.difference_update(outputs)
        read.update(operation.inputs)
    return frozenset(unread)


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """The runs strictly between `start` and `end`, none of which reads an operation's output."""

    start: int
    end: int


def longest_idle_span(plan: PlanData, op: int, timeline: Timeline) -> IdleSpan | None:
    """Return the span in which the operation's output is not read: one that contains the peak if
    there is one, otherwise the longest. None without a span, and for a result, which stays in
    memory anyway."""
    graph, runs = plan.graph, plan.schedule.runs
    outputs = {v for v in graph.operations[op].outputs if v not in graph.results}
    uses = [
        run
        for run, o in enumerate(runs)
        if o == op or not outputs.isdisjoint(graph.operations[o].inputs)
    ]
    spans = [IdleSpan(a, b) for a, b in pairwise(uses) if b > a + 1]
    if not outputs or not spans:
        return None
    peak = timeline.peak_run
    return max(spans, key=lambda s: (s.start < peak < s.end, _span_time_s(plan, s), s.end))


# -- one operation ------------------------------------------------------------------------------


def _explain_operation(plan: PlanData, op: int) -> list[str]:
    """Return the lines about an operation."""
    graph = plan.graph
    operation = graph.operations[op]
    size = sum(graph.values[v].size_bytes for v in operation.outputs)
    runs = [run for run, o in enumerate(plan.schedule.runs) if o == op]
    module = f" in {operation.module}" if operation.module else ""
    timeline = plan.timeline()
    lines = [
        f"{operation.name}: {phase(graph, op)} operation {op} of {len(graph)}{module}, "
        f"{format_seconds(operation.cost_s)}, output {format_bytes(size)}"
    ]
    if operation.piece_of:
        label = operation_labels(graph)[op]
        lines.append(f"  piece {operation.piece + 1} of {label}")
    on_host = host_lines(plan, op)
    if len(runs) == 1:
        lines.append(f"  not recomputed: runs once (run {runs[0]})")
        lines += on_host or _why_retained(plan, op, timeline)
    else:
        lines.append(f"  recomputed: runs {len(runs)} times (runs {', '.join(map(str, runs))})")
        lines += [*on_host, *_why_recomputed(plan, op, timeline)]
    if operation.order_sensitive and operation.recomputable:
        lines.append(
            "  it samples random numbers or reads or writes a mutated buffer: a recomputation "
            "samples the same numbers and does not change the buffer"
        )
    return lines + _output_copy_lines(plan, op, timeline)


def _why_recomputed(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """Return lines about the cost and the saved memory of an operation's recomputations, and about
    the plan without them."""
    graph = plan.graph
    schedule, old_runs = without_recomputation(graph, plan.schedule, op)
    alternative = simulate(graph, schedule)
    runs = [run for run, o in enumerate(plan.schedule.runs) if o == op]
    others = len(plan.schedule) - len(schedule) - (len(runs) - 1)
    extra_s = timeline.time_s - alternative.time_s
    cost = f"  it costs {format_seconds(extra_s)}{_share_of_step_text(plan, extra_s)}"
    if others:
        cost += f", including {others} {plural('recomputation', others)} of its inputs"
    lines = [cost, *_freed_lines(plan, op, timeline)]
    spare = plan.budget_bytes - alternative.peak_bytes
    peak = (
        f"retained instead, the peak would be {format_bytes(alternative.peak_bytes)}, "
        f"{_run_text(graph, schedule, alternative.peak_run, old_runs[alternative.peak_run])}"
    )
    if spare < 0:
        lines.append(f"  {peak}: {format_bytes(-spare)} over the budget")
        return lines
    lines.append(
        f"  {peak}: it fits, with {format_bytes(spare)} to spare. The recomputation is unnecessary"
        f"{_why_unneeded_recomputation(plan, extra_s)}"
    )
    return lines


def _freed_lines(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """Return, for each output, the runs between its copies, and the bytes that are free there."""
    graph = plan.graph
    lines: list[str] = []
    for value in graph.operations[op].outputs:
        copies = [c for c in timeline.copies if c.value == value]
        size = graph.values[value].size_bytes
        if value in graph.results or not size:
            continue
        spans = [IdleSpan(a.end, b.start) for a, b in pairwise(copies)]
        free_s = sum(_span_time_s(plan, span) for span in spans)
        runs = ", ".join(f"{span.start} and {span.end}" for span in spans)
        lines.append(
            f"  it frees {format_bytes(size)} ({graph.values[value].name}) between runs {runs}, "
            f"for {format_seconds(free_s)}: {format_bytes(size * free_s)} x s"
        )
    return lines


def _why_unneeded_recomputation(plan: PlanData, extra_s: float) -> str:
    """Return why the solver could leave a recomputation of `extra_s` in the plan that is not
    needed."""
    if plan.gap is None:
        return " (this strategy proves no lower bound)"
    if extra_s <= plan.gap * plan.time_s:
        return f" (the time that it costs is within the gap of {plan.gap:.3%})"
    return f" (the plan's bound is proved only for {SCOPE_TEXT[plan.bound_scope]})"


def _why_retained(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """Return lines about why an operation cannot be recomputed, or about what its recomputation
    would cost and save."""
    graph = plan.graph
    operation = graph.operations[op]
    if reason := _why_not_recomputable(graph, op):
        return [f"  {reason}"]
    span = longest_idle_span(plan, op, timeline)
    if span is None:
        return ["  its output is never idle: there is no run between its uses"]
    runs = plan.schedule.runs
    schedule = Schedule((*runs[: span.end], op, *runs[span.end :]))
    alternative = simulate(graph, schedule)
    size = sum(graph.values[v].size_bytes for v in operation.outputs if v not in graph.results)
    before = f"before run {span.end} ({graph.operations[runs[span.end]].name})"
    lines = [
        f"  recomputed {before} instead, it would cost {format_seconds(operation.cost_s)}"
        f"{_share_of_step_text(plan, operation.cost_s)}, and free {format_bytes(size)} after run "
        f"{span.start} for {format_seconds(_span_time_s(plan, span))}"
    ]
    peak_run = timeline.peak_run
    saved_bytes = timeline.peak_bytes - alternative.peak_bytes
    peak = f"the peak, {_run_text(graph, plan.schedule, peak_run, peak_run)},"
    if saved_bytes > 0:
        spare = format_bytes(plan.budget_bytes - plan.peak_bytes)
        lines.append(
            f"  {peak} would be {format_bytes(saved_bytes)} less; the budget does not require it: "
            f"it has {spare} to spare"
        )
    elif saved_bytes < 0:
        lines.append(
            f"  the peak would be {format_bytes(-saved_bytes)} more: its inputs would be retained "
            "for it"
        )
    elif span.start < peak_run < span.end:
        lines.append(
            f"  {peak} would not change: its inputs would be retained for it, or another run is as "
            "large"
        )
    else:
        lines.append(f"  {peak} would not change: its output is not idle there")
    return lines


def _why_not_recomputable(graph: Graph, op: int) -> str:
    """Return why an operation cannot be recomputed, or why this is of no use; "" otherwise."""
    operation = graph.operations[op]
    if op == graph.boundary:
        return "it marks the start of the backward pass and cannot be recomputed"
    if any(op in offloaded.operations for offloaded in offloaded_values(graph)):
        return "it starts a copy between device and host, or waits for one, which is made once"
    if not operation.recomputable:
        return (
            "it cannot be recomputed (recomputable=False): it mutates memory, a second run would "
            "give another result, or it belongs to the backward of a compiled step"
        )
    if not operation.outputs:
        return "it has no output to free"
    if all(v in graph.results for v in operation.outputs):
        return "its output is a result (of the model, or a gradient): it stays live to the end"
    if not any(graph.consumers[v] for v in operation.outputs):
        return "nothing reads its output, which is freed at once"
    return ""


def _output_copy_lines(plan: PlanData, op: int, timeline: Timeline) -> list[str]:
    """Return a line for each copy of an operation's outputs: from which run to which it is live."""
    graph, lines = plan.graph, list[str]()
    for copy in timeline.copies:
        if copy.value not in graph.operations[op].outputs:
            continue
        value = graph.values[copy.value]
        if copy.end >= len(plan.schedule):
            end = "live to the end (a result)"
        else:
            last_reader = graph.operations[plan.schedule.runs[copy.end]].name
            end = f"freed after run {copy.end} ({last_reader})"
        size = format_bytes(value.size_bytes)
        is_reloaded = graph.renewal.get(copy.value) == plan.schedule.runs[copy.start]
        verb = "copied back by" if is_reloaded else "produced in"
        lines.append(f"  {value.name} ({size}): {verb} run {copy.start}, {end}")
    return lines


# -- parts of sentences ---------------------------------------------------------------------------


def _unknown_name_text(graph: Graph, name: str) -> str:
    """Return the error for an unknown name, with similar names."""
    modules: set[str] = set()
    for operation in graph.operations:
        parts = operation.module.split(".")
        modules.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    names = [*(operation.name for operation in graph.operations), *sorted(modules - {""})]
    hint = similar_names_hint(name, dict.fromkeys(names), lead="; near: ")
    return (
        f"no operation and no module is called {name!r}{hint}; plan.graph.operations has all "
        "names and modules"
    )


def _run_text(graph: Graph, schedule: Schedule, run: int, displayed_run: int) -> str:
    """Return the operation, pass and module of a run as text. `displayed_run` is its number in the
    plan, if `schedule` is another one."""
    op = schedule.runs[run]
    module = graph.operations[op].module
    return (
        f"in run {displayed_run} ({graph.operations[op].name}, {phase(graph, op)}"
        f"{f', {module}' if module else ''})"
    )


def _share_of_step_text(plan: PlanData, time_s: float) -> str:
    """Return a time as a percentage of the step without recomputation, as text; "" if that takes no
    time."""
    if plan.baseline_time_s <= 0:
        return ""
    return f", {time_s / plan.baseline_time_s:.3%} of the step without recomputation"


def _span_time_s(plan: PlanData, span: IdleSpan) -> float:
    """Return the time that the runs of a span take."""
    runs = plan.schedule.runs[span.start + 1 : span.end]
    return sum(plan.graph.operations[op].cost_s for op in runs)


def _first_run_of_operations(schedule: Schedule) -> dict[int, int]:
    """Return the first run of each operation."""
    first: dict[int, int] = {}
    for run, op in enumerate(schedule.runs):
        first.setdefault(op, run)
    return first
