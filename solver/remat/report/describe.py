"""Plans as text: `describe`, `diff`, and `describe_peak`. Every number has a unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from remat.errors import wrong_type
from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import count_without_copies
from remat.plan_data import PlanData, Status
from remat.report.offloads import offload_lines
from remat.report.solve_progress import describe_solve_steps
from remat.report.splits import split_lines
from remat.report.tables import align_columns, fold_layer_numbers, largest_rows
from remat.schedule import Schedule
from remat.simulate import simulate

SCOPE_TEXT = {
    "slots": "every schedule over the slots",
    "order": "every schedule of this order",
    "all orders": "every schedule in any order",
}
"""The schedules that a plan's bound is proved for, as text, by `bound_scope`."""

_MAX_ROWS = 16
_MAX_NAMED_VALUES = 3


def describe(plan: PlanData, solve: bool = False) -> str:
    """Return a short table about a plan; with `solve`, followed by the steps of its solve."""
    graph = plan.graph
    recomputed = plan.schedule.recomputed(graph)
    source = plan.terms.cost_source or "as given"
    lines = [
        f"plan      {plan.status.name.lower()}: {plan.status.value}{_gap_text(plan)}",
        f"budget    {format_bytes(plan.budget_bytes)}{_lowered_text(plan)}{_reserve_text(plan)}",
        f"peak      {format_bytes(plan.peak_bytes)}, {plan.share:.1%} of "
        f"{format_bytes(plan.baseline_peak_bytes)} without recomputation "
        f"({format_bytes(graph.constant_bytes)} constant{_library_text(plan)})",
        *_allocator_line(plan),
        f"time      {format_seconds(plan.time_s)}, {plan.overhead:+.3%} over "
        f"{format_seconds(plan.baseline_time_s)} (costs {source})",
        *_launch_line(plan),
        f"bound     {_bound_text(plan)}",
        *_labelled("split", split_lines(plan)),
        *_labelled("offload", offload_lines(plan)),
        f"recompute {_recomputation_text(graph, recomputed)}",
    ]
    if plan.terms.cuda_graphs:
        lines.append("random    each random operation runs once per step, as a CUDA graph requires")
    solver = _solver_text(plan)
    if solver:
        lines.append(f"solver    {solver}")
    if recomputed:
        lines += ["", *_module_table(plan, recomputed)]
    if solve:
        lines += ["", describe_solve_steps(plan)]
    return "\n".join(lines)


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
    largest_text = ", ".join(f"{format_bytes(sizes[v])} of {_producer(graph, v)}" for v in largest)
    phase = "backward" if operation.backward else "forward"
    module = f", {operation.module}" if operation.module else ""
    return (
        f"the peak is in {operation.name} ({phase}{module}): {parts_text}; the largest are "
        f"{largest_text}"
    )


def _producer(graph: Graph, value: int) -> str:
    """Return the name of the operation that produces a value, with its module."""
    producer = graph.operations[graph.producer[value]]
    return f"{producer.name} ({producer.module})" if producer.module else producer.name


def _recomputation_text(graph: Graph, recomputed: Mapping[int, int]) -> str:
    """Return how many operations are recomputed, and how often, as text."""
    text = f"{len(recomputed):,} of {count_without_copies(graph):,} operations"
    times = sum(recomputed.values())
    if not recomputed:
        return text
    return f"{text}, {'once each' if times == len(recomputed) else f'{times:,} times in all'}"


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    """Return lines of which the first has a label."""
    return [f"{'' if i else label:<10}{text}" for i, text in enumerate(texts)]


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


def _lowered_text(plan: PlanData) -> str:
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


def _allocator_line(plan: PlanData) -> list[str]:
    """Return a line with the peak that is predicted for torch's allocator; none without one."""
    prediction = plan.allocator
    if prediction is None:
        return []
    return [
        f"allocator {format_bytes(prediction.allocated_peak_bytes)} allocated, "
        f"{format_bytes(prediction.reserved_peak_bytes)} reserved; with expandable segments "
        f"{format_bytes(prediction.expandable_allocated_peak_bytes)} and "
        f"{format_bytes(prediction.expandable_reserved_peak_bytes)} (predicted)",
    ]


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


def _launch_line(plan: PlanData) -> list[str]:
    """Return a line about the launch time if that is longer than the time on the device."""
    launch_s = plan.terms.launch_s
    if launch_s is None or launch_s <= plan.time_s:
        return []
    return [
        f"launch    the step is launch-bound: the CPU takes {format_seconds(launch_s)} to launch "
        "its operations, longer than the device takes to run them"
    ]


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


def _module_table(plan: PlanData, recomputed: dict[int, int]) -> list[str]:
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
    return align_columns([("recomputed module", "runs", "time", "output"), *rows])


def recomputations_by_name(plan: PlanData) -> dict[str, int]:
    """Return the number of recomputations of each recomputed operation, by its name."""
    recomputed = plan.schedule.recomputed(plan.graph)
    return {plan.graph.operations[op].name: times for op, times in recomputed.items()}
