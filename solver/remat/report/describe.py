"""Plans in words: `describe` and `diff`. Every number has a unit."""

from __future__ import annotations

from collections import defaultdict

from remat.allocator.prediction import AllocatorPrediction
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import RESERVED_BYTES_STAT, PlanData
from remat.report.solve_progress import describe_solve_steps
from remat.report.tables import align_columns, largest_rows, fold_layer_numbers

SCOPE_TEXT = {
    "slots": "every schedule over the slots offered",
    "order": "every schedule of this order",
    "all orders": "every schedule in any order",
}
"""What a plan's bound is proved for, in words."""

_ROWS = 16


def describe(plan: PlanData, solve: bool = False) -> str:
    """A compact table of one plan; with `solve`, also of the steps that it was solved by."""
    graph = plan.graph
    again = plan.schedule.recomputed(graph)
    source = plan.stats.get("cost_source", "as given")
    lines = [
        f"plan      {plan.status.name.lower()}: {plan.status.value}",
        f"budget    {format_bytes(plan.budget_bytes)}{_asked(plan)}{_beside(plan)}",
        f"peak      {format_bytes(plan.peak_bytes)}, {plan.share:.1%} of "
        f"{format_bytes(plan.baseline_peak_bytes)} without recomputation "
        f"({format_bytes(graph.constant_bytes)} constant{_libraries(plan)})",
        *_allocator(plan),
        f"time      {format_seconds(plan.time_s)}, {plan.overhead:+.3%} over "
        f"{format_seconds(plan.baseline_time_s)} (costs {source})",
        *_launches(plan),
        f"bound     {_bound(plan)}",
        f"recompute {sum(again.values())} runs of {len(again)} of {len(graph)} operations",
    ]
    if plan.stats.get("cuda_graphs"):
        lines.append("random    drawn once in a step, so that a CUDA graph can hold it")
    solver = _solver(plan)
    if solver:
        lines.append(f"solver    {solver}")
    if again:
        lines += ["", *_modules(plan, again)]
    if solve:
        lines += ["", describe_solve_steps(plan)]
    return "\n".join(lines)


def _libraries(plan: PlanData) -> str:
    """Percentages leave them out, which has to be said."""
    held = plan.graph.library_bytes
    return f", {format_bytes(held)} libraries' and in no percentage" if held else ""


def _asked(plan: PlanData) -> str:
    asked = plan.stats.get("requested_budget_bytes")
    if not isinstance(asked, int):
        return ""
    less = format_bytes(asked - plan.budget_bytes)
    return f", {less} below the {format_bytes(asked)} asked for, so that blocks fit as well"


def _beside(plan: PlanData) -> str:
    reserved = plan.stats.get(RESERVED_BYTES_STAT)
    return f", beside {format_bytes(reserved)} reserved" if isinstance(reserved, int) else ""


def _allocator(plan: PlanData) -> list[str]:
    """What torch's allocator makes of the peak, where it is known."""
    found = AllocatorPrediction.of_plan(plan)
    if found is None:
        return []
    return [
        f"allocator {format_bytes(found.allocated_bytes)} allocated, "
        f"{format_bytes(found.reserved_bytes)} reserved; with expandable segments "
        f"{format_bytes(found.expandable_allocated_bytes)} and "
        f"{format_bytes(found.expandable_reserved_bytes)} (predicted)",
    ]


def diff(plan: PlanData, other: PlanData) -> str:
    """What changes from `plan` to `other`."""
    mine, theirs = recomputations_by_name(plan), recomputations_by_name(other)
    lines = [
        f"budget {format_bytes(plan.budget_bytes)} -> {format_bytes(other.budget_bytes)}",
        f"peak   {format_bytes(plan.peak_bytes)} -> {format_bytes(other.peak_bytes)} "
        f"({format_bytes(other.peak_bytes - plan.peak_bytes)})",
        f"time   {format_seconds(plan.time_s)} -> {format_seconds(other.time_s)} "
        f"(overhead {plan.overhead:.3%} -> {other.overhead:.3%})",
    ]
    changed = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n, 0) != theirs.get(n, 0))
    lines += [f"  {n}: recomputed {mine.get(n, 0)} -> {theirs.get(n, 0)} times" for n in changed]
    if not changed:
        lines.append("  the same operations are recomputed, equally often")
    return "\n".join(lines)


def _launches(plan: PlanData) -> list[str]:
    launch_s = plan.stats.get("launch_s")
    if not isinstance(launch_s, float) or launch_s <= plan.time_s:
        return []
    return [
        f"launch    the CPU takes {format_seconds(launch_s)} to launch this: launch-bound, a step "
        "takes that long, whatever is recomputed in between"
    ]


def _bound(plan: PlanData) -> str:
    if plan.lower_bound is None or plan.gap is None:
        return "none proved"
    scope = SCOPE_TEXT[plan.bound_scope]
    told = f"{plan.lower_bound:+.3%} at least, proved for {scope}; gap {plan.gap:.3%} of the time"
    slots_bound = plan.stats.get("slots_bound")
    if isinstance(slots_bound, float) and slots_bound > plan.lower_bound:
        slots_gap = max(0.0, (plan.overhead - slots_bound) / (1 + plan.overhead))
        told += f" ({slots_bound:+.3%} over the slots offered; gap {slots_gap:.3%})"
    return told


def _solver(plan: PlanData) -> str:
    stats = plan.stats
    facts = [str(stats[key]) for key in ("strategy", "solver") if key in stats]
    facts += [f"{stats[key]} {key}" for key in ("slots", "rows", "columns") if stats.get(key)]
    solved_s = stats.get("total_s")
    if isinstance(solved_s, int | float):
        facts.append(f"solved in {format_seconds(solved_s)}")
    return ", ".join(facts)


def _modules(plan: PlanData, again: dict[int, int]) -> list[str]:
    """One line a module: runs, seconds, and bytes made again; the dearest first. Layers of the same
    name but for their number share a line."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for op, times in again.items():
        operation = plan.graph.operations[op]
        size = sum(plan.graph.values[v].size_bytes for v in operation.outputs)
        found = sums[fold_layer_numbers(operation.module)]
        for column, amount in enumerate((operation.cost_s, 1, size)):
            found[column] += times * amount
    rows = [
        (name, str(runs), format_seconds(seconds), format_bytes(size))
        for name, (seconds, runs, size) in largest_rows(sums, _ROWS)
    ]
    return align_columns([("module", "again", "time", "output"), *rows])


def recomputations_by_name(plan: PlanData) -> dict[str, int]:
    """How many extra times each operation runs, for those that run more than once."""
    again = plan.schedule.recomputed(plan.graph)
    return {plan.graph.operations[op].name: times for op, times in again.items()}
