"""A plan in words: its figures, splits and offloaded tensors; its peak; two plans compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from remat.errors import wrong_type
from remat.graph import Graph, Split
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import count_without_offload_copies, offloaded_values
from remat.plan_data import PlanData, Status
from remat.report.report import (
    Fact,
    Report,
    Table,
    facts_of_lines,
    fold_layer_numbers,
    largest_rows,
)
from remat.report.solve_progress import steps_report
from remat.schedule import Schedule
from remat.simulate import simulate

SCOPE_TEXT = {
    "slots": "every schedule over the slots",
    "order": "every schedule of the plan's order",
    "all orders": "every schedule in any order",
}
"""The schedules that a plan's bound is proved for, as text, by `bound_scope`."""

_MAX_ROWS = 16
_MAX_NAMED_VALUES = 3
_MAX_SPLITS = 6


def plan_report(plan: PlanData, solve: bool = False) -> Report:
    """Return the report of a plan; with `solve`, also of the candidates among which it was
    selected, and of the steps of its solve."""
    graph = plan.graph
    recomputed = plan.schedule.recomputed(graph)
    source = plan.terms.cost_source or "as given"
    facts = [
        Fact("plan", f"{plan.status.name.lower()}: {plan.status.value}{_gap_text(plan)}"),
        Fact(
            "budget",
            f"{format_bytes(plan.budget_bytes)}{_lowered_budget_text(plan)}{_reserve_text(plan)}",
        ),
        Fact(
            "peak",
            f"{format_bytes(plan.peak_bytes)}, {plan.share:.1%} of "
            f"{format_bytes(plan.baseline_peak_bytes)} without recomputation "
            f"({format_bytes(graph.constant_bytes)} constant{_library_text(plan)})",
        ),
        *_allocator_fact(plan),
        Fact(
            "time",
            f"{format_seconds(plan.time_s)}, {plan.overhead:+.3%} over "
            f"{format_seconds(plan.baseline_time_s)} (costs {source})",
        ),
        *_launch_fact(plan),
        Fact("bound", _bound_text(plan)),
        *facts_of_lines("split", split_lines(plan)),
        *facts_of_lines("offload", offload_lines(plan)),
        Fact("recompute", _recomputation_text(graph, recomputed)),
    ]
    if plan.terms.cuda_graphs:
        text = "each random operation runs once per step, as a CUDA graph requires"
        facts.append(Fact("random", text))
    if solver := _solver_text(plan):
        facts.append(Fact("solver", solver))
    table = _module_table(plan, recomputed) if recomputed else ""
    if not solve:
        return Report(facts, table)
    return Report(facts, table, candidates_table(plan), *steps_report(plan).parts)


def candidates_table(plan: PlanData) -> Table | str:
    """Return a table of the candidates among which a plan was selected, with the reason why each of
    the others was not; "" if there was one."""
    if not plan.candidates:
        return ""
    rows = [
        (
            candidate.name,
            "-" if candidate.peak_bytes is None else format_bytes(candidate.peak_bytes),
            "-" if candidate.overhead is None else f"{candidate.overhead:+.3%}",
            f"{candidate.outcome} (estimate)" if candidate.is_estimate else candidate.outcome,
        )
        for candidate in plan.candidates
    ]
    return Table([("candidate", "peak", "extra time", "outcome"), *rows], "lrrl")


def describe_peak(graph: Graph, schedule: Schedule) -> str:
    """Return a sentence about the peak of a schedule: in which operation it is, what it consists
    of, and the largest values that are live there."""
    timeline = simulate(graph, schedule)
    run = timeline.peak_run
    operation = graph.operations[schedule.runs[run]]
    operands = {*operation.inputs, *operation.outputs}
    others = [
        copy
        for copy in timeline.copies
        if copy.start <= run <= copy.end and copy.value not in operands
    ]
    results = [copy.value for copy in others if copy.end >= len(schedule)]
    retained = [copy.value for copy in others if copy.end < len(schedule)]
    result_bytes = sum(graph.values[v].size_bytes for v in results)
    retained_bytes = sum(graph.values[v].size_bytes for v in retained)
    parts = {
        "parameters, buffers and batch": graph.constant_bytes,
        "inputs and outputs of this operation": (
            timeline.peak_bytes - graph.constant_bytes - result_bytes - retained_bytes
        ),
        "gradients and outputs": result_bytes,
        "values retained for later": retained_bytes,
    }
    parts_text = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)
    sizes = {v: graph.values[v].size_bytes for v in {*operands, *results, *retained}}
    largest = sorted(sizes, key=lambda v: (-sizes[v], v))[:_MAX_NAMED_VALUES]
    largest_text = ", ".join(
        f"{format_bytes(sizes[v])} of {_producer_text(graph, v)}" for v in largest
    )
    phase = "backward" if operation.backward else "forward"
    module = f", {operation.module}" if operation.module else ""
    return (
        f"the peak is in {operation.name} ({phase}{module}): {parts_text}; the largest are "
        f"{largest_text}"
    )


def _producer_text(graph: Graph, value: int) -> str:
    """Return the name of the operation that produces a value, with its module."""
    producer = graph.operations[graph.producer[value]]
    return f"{producer.name} ({producer.module})" if producer.module else producer.name


def _recomputation_text(graph: Graph, recomputed: Mapping[int, int]) -> str:
    """Return how many operations are recomputed, and how often, as text."""
    text = f"{len(recomputed):,} of {count_without_offload_copies(graph):,} operations"
    times = sum(recomputed.values())
    if not recomputed:
        return text
    return f"{text}, {'once each' if times == len(recomputed) else f'{times:,} times in all'}"


def _gap_text(plan: PlanData) -> str:
    """Return the gap that was requested as text, after the words of an OPTIMAL plan; "" if the
    strategy has no such option."""
    gap = plan.terms.requested_gap
    if plan.status is not Status.OPTIMAL or gap is None:
        return ""
    return f" of {100 * gap:.4g}%"


def _library_text(plan: PlanData) -> str:
    """Return the bytes of libraries as text, because percentages exclude them; "" if none."""
    library_bytes = plan.graph.library_bytes
    if not library_bytes:
        return ""
    return f", {format_bytes(library_bytes)} of libraries, not in the percentage"


def _lowered_budget_text(plan: PlanData) -> str:
    """Return by how much the budget was lowered to make the allocator's peak fit; "" if not."""
    requested_bytes = plan.terms.requested_budget_bytes
    if requested_bytes is None:
        return ""
    lowered = format_bytes(requested_bytes - plan.budget_bytes)
    return f", {lowered} below the requested {format_bytes(requested_bytes)}, to fit the allocator"


def _reserve_text(plan: PlanData) -> str:
    """Return the bytes that are reserved for other uses as text; "" if none."""
    reserve_bytes = plan.terms.reserved_for_others_bytes
    return "" if reserve_bytes is None else f", plus {format_bytes(reserve_bytes)} reserved"


def _allocator_fact(plan: PlanData) -> list[Fact]:
    """Return a line with the peak that is predicted for torch's allocator; none without one."""
    prediction = plan.allocator
    if prediction is None:
        return []
    text = (
        f"{format_bytes(prediction.allocated_peak_bytes)} allocated, "
        f"{format_bytes(prediction.reserved_peak_bytes)} reserved; with expandable segments "
        f"{format_bytes(prediction.expandable_allocated_peak_bytes)} and "
        f"{format_bytes(prediction.expandable_reserved_peak_bytes)} (predicted)"
    )
    return [Fact("allocator", text)]


def diff(plan: PlanData, other: PlanData) -> str:
    """Return the differences between two plans: budget, peak, time, recomputed operations."""
    if not isinstance(other, PlanData):
        raise wrong_type("diff", "a Plan", other, "pass what remat.solve returned")
    before, after = recomputations_by_name(plan), recomputations_by_name(other)
    lines = [
        f"budget {format_bytes(plan.budget_bytes)} -> {format_bytes(other.budget_bytes)}",
        f"peak   {format_bytes(plan.peak_bytes)} -> {format_bytes(other.peak_bytes)} "
        f"({format_bytes(other.peak_bytes - plan.peak_bytes)})",
        f"time   {format_seconds(plan.time_s)} -> {format_seconds(other.time_s)} "
        f"(overhead {plan.overhead:.3%} -> {other.overhead:.3%})",
    ]
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name, 0) != after.get(name, 0)
    )
    lines += [f"  {n}: recomputed {before.get(n, 0)} -> {after.get(n, 0)} times" for n in changed]
    if not changed:
        lines.append("  the same operations are recomputed, the same number of times")
    return "\n".join(lines)


def _launch_fact(plan: PlanData) -> list[Fact]:
    """Return a line about the launch time if that is longer than the time on the device."""
    launch_s = plan.terms.launch_s
    if launch_s is None or launch_s <= plan.time_s:
        return []
    text = (
        f"the step is launch-bound: the CPU takes {format_seconds(launch_s)} to launch its "
        "operations, longer than the device takes to run them"
    )
    return [Fact("launch", text)]


def _bound_text(plan: PlanData) -> str:
    """Return the lower bound, the schedules that it is proved for, and the gap, as text."""
    if plan.lower_bound is None or plan.gap is None:
        return "none proved"
    scope = SCOPE_TEXT[plan.bound_scope]
    text = f"{plan.lower_bound:+.3%} at least, proved for {scope}; gap {plan.gap:.3%} of the time"
    slots_bound = plan.solve.get("slots_bound")
    if isinstance(slots_bound, float) and slots_bound > plan.lower_bound:
        slots_gap = max(0.0, (plan.overhead - slots_bound) / (1 + plan.overhead))
        text += f" ({slots_bound:+.3%} over the slots; gap {slots_gap:.3%})"
    return text


def _solver_text(plan: PlanData) -> str:
    """Return the strategy, the solver, the size of the MILP and the solve time, as text."""
    stats = plan.solve
    facts = [str(stats[key]) for key in ("strategy", "solver") if key in stats]
    facts += [f"{stats[key]} {key}" for key in ("slots", "rows", "columns") if stats.get(key)]
    solved_s = stats.get("total_s")
    if isinstance(solved_s, int | float):
        facts.append(f"solved in {format_seconds(solved_s)}")
    return ", ".join(facts)


def _module_table(plan: PlanData, recomputed: dict[int, int]) -> Table:
    """Return a table of the recomputations by module: number, seconds, and bytes of the outputs,
    the most expensive module first. Layers that differ only in their number share a line."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for op, times in recomputed.items():
        operation = plan.graph.operations[op]
        size = sum(plan.graph.values[v].size_bytes for v in operation.outputs)
        module_sums = sums[fold_layer_numbers(operation.module)]
        for column, amount in enumerate((operation.cost_s, 1, size)):
            module_sums[column] += times * amount
    rows = [
        (name, str(runs), format_seconds(seconds), format_bytes(size))
        for name, (seconds, runs, size) in largest_rows(sums, _MAX_ROWS)
    ]
    return Table([("recomputed module", "runs", "time", "output"), *rows])


def recomputations_by_name(plan: PlanData) -> dict[str, int]:
    """Return the number of recomputations of each recomputed operation, by its name."""
    recomputed = plan.schedule.recomputed(plan.graph)
    return {plan.graph.operations[op].name: times for op, times in recomputed.items()}


# -- split operations and offloaded tensors -------------------------------------------------------


def split_lines(plan: PlanData) -> list[str]:
    """Return a line for each kind of split, and one about the step without them; and why the logits
    are not split, if that is known."""
    reason = plan.declined.not_split
    return [*_split_lines(plan, plan.graph.splits), *([] if reason is None else [reason])]


def split_lines_of_operations(plan: PlanData, ops: Sequence[int]) -> list[str]:
    """Return the lines about the splits of the modules that contain `ops`, indented; [] without
    any."""
    pieces = [o for op in ops if (o := plan.graph.operations[op]).piece_of]
    modules = {o.module for o in pieces}
    lines = _split_lines(plan, [s for s in plan.graph.splits if s.module in modules])
    reason = plan.declined.not_split
    if reason and reason.split(":")[0] in {plan.graph.operations[op].module for op in ops}:
        lines.append(reason)
    return [f"  {line}" for line in lines]


def _split_lines(plan: PlanData, splits: Sequence[Split]) -> list[str]:
    if not splits:
        return []
    kinds: dict[tuple[str, int, int], list[Split]] = {}
    for split in splits:
        key = fold_layer_numbers(split.module or split.seed), split.rows, split.pieces
        kinds.setdefault(key, []).append(split)
    texts = [_split_text(*kind, alike) for kind, alike in kinds.items()]
    if len(texts) > _MAX_SPLITS:
        texts[_MAX_SPLITS:] = [f"{len(texts) - _MAX_SPLITS} more kinds"]
    unsplit = _unsplit_text(plan)
    return [*texts, f"without splitting: {unsplit}"] if unsplit else texts


def _split_text(module: str, rows: int, pieces: int, alike: Sequence[Split]) -> str:
    """Return the text about the splits of one module, or of the modules of that name in all
    layers."""
    size_bytes = max(split.split_bytes for split in alike)
    places = f" in each of {len(alike)} places" if len(alike) > 1 else ""
    return (
        f"{module} x {pieces}: {_rows_text(rows, pieces)} at a time; "
        f"{format_bytes(size_bytes)} of tensors exist only in pieces{places}"
    )


def _rows_text(rows: int, pieces: int) -> str:
    """Return the number of rows of each piece, as text."""
    small, larger = divmod(rows, pieces)
    return f"{small:,} or {small + 1:,} rows" if larger else f"{small:,} rows"


def _unsplit_text(plan: PlanData) -> str:
    """Return what is known of the step's best plan before the splits, or ""."""
    if plan.split is None:
        return ""
    smallest, bound = plan.split.unsplit_min_bytes, plan.split.unsplit_bound
    if smallest is not None:
        share = smallest / plan.baseline_peak_bytes
        return f"the smallest peak known is {format_bytes(smallest)} ({share:.1%})"
    return "" if bound is None else f"{bound:+.3%} extra time at least"


def offload_lines(plan: PlanData) -> list[str]:
    """Return the lines about all offloaded tensors, or why there are none; no line if they may not
    be offloaded."""
    graph = plan.graph
    if not graph.renewal:
        reason = plan.declined.not_offloaded
        return [] if reason is None else [f"nothing is offloaded: {reason}"]
    lines = [
        f"{len(graph.renewal)} tensors of "
        f"{format_bytes(sum(graph.values[v].size_bytes for v in graph.renewal))} are offloaded to "
        "the host"
    ]
    if plan.offload is not None:
        copies_s, waiting_s = plan.offload.copies_s, plan.offload.waiting_s
        lines.append(
            f"copies take {format_seconds(copies_s)}, for {format_seconds(waiting_s)} of which the "
            f"step waits ({waiting_s / (plan.time_s or 1.0):.2%} of its time)"
        )
    return lines


def host_lines(plan: PlanData, op: int) -> list[str]:
    """Return a line for each output of an operation that is offloaded, indented."""
    graph = plan.graph
    run_of = {o: run for run, o in reversed([*enumerate(plan.schedule.runs)])}  # first runs
    lines: list[str] = []
    for offloaded in offloaded_values(graph):
        if graph.producer[offloaded.value] != op:
            continue
        value = graph.values[offloaded.value]
        readers = (
            run
            for run in range(run_of[offloaded.arrive] + 1, len(plan.schedule))
            if offloaded.value in graph.operations[plan.schedule.runs[run]].inputs
        )
        if (reader := next(readers, None)) is None:
            purpose = "and nothing reads it then"
        else:
            purpose = f"for run {reader} ({graph.operations[plan.schedule.runs[reader]].name})"
        waits_s = sum(graph.operations[o].cost_s for o in (offloaded.release, offloaded.arrive))
        lines.append(
            f"  {value.name} ({format_bytes(value.size_bytes)}) is offloaded: it leaves the device "
            f"by run {run_of[offloaded.release]} and starts to come back in run "
            f"{run_of[offloaded.reload]}, {purpose}; the step waits "
            f"{format_seconds(waits_s)} for its copies"
        )
    return lines
