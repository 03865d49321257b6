"""How much time each module of the model spends on recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.report import fold_layer_numbers
from remat.view.picture import RUNS, Box, Panel, Picture, RowLabel, Scale, second_unit
from remat.view.text import plain_text, shorten_name

MAX_BARS = 24
_ROW = 20.0
_ROOM_FOR_LABELS = 1.25
"""The end of the horizontal axis, relative to the longest bar: labels are to its right."""

_MAX_NAME_LENGTH = 44
_MAX_DEPTH = 8


@dataclass(slots=True)
class ModuleRecomputation:
    """The recomputations of a module, or of a group of modules: their number, their seconds, and
    the bytes of their outputs."""

    name: str
    runs: int = 0
    time_s: float = 0.0
    size_bytes: int = 0


def modules_picture(plan: PlanData) -> Picture:
    """Return the recomputed time by module: one bar per module, in the order of the model. Bars are
    seconds, or runs if recomputation takes no time."""
    modules = recomputation_by_module(plan)
    by_time = any(module.time_s > 0 for module in modules)
    lengths = [module.time_s if by_time else float(module.runs) for module in modules]
    items: list[Box] = []
    rows: list[RowLabel] = []
    for row, (module, length) in enumerate(zip(modules, lengths, strict=True)):
        runs = f"{module.runs:,} run{'s' if module.runs != 1 else ''}"
        label = f"{format_seconds(module.time_s)}, {runs}"
        tip = f"{module.name}: {label}, {format_bytes(module.size_bytes)} recomputed"
        items.append(Box("recomputed", 0, length, row + 0.1, row + 0.85, tip, label))
        name = shorten_name(plain_text(module.name), _MAX_NAME_LENGTH)
        rows.append(RowLabel(name, row, row + 0.95, module.name))
    longest = max(lengths, default=0.0) or 1.0
    unit = second_unit(longest) if by_time else RUNS
    count = max(len(modules), 1)
    return Picture(
        "Recomputed time by module",
        _recomputation_summary(plan),
        x=Scale(0, longest * _ROOM_FOR_LABELS, unit, f"time ({unit.name})" if by_time else "runs"),
        panels=[Panel(Scale(count, 0), count * _ROW, items, rows)],
    )


def recomputation_by_module(plan: PlanData, limit: int = MAX_BARS) -> list[ModuleRecomputation]:
    """Return the recomputations by module, in the order of the graph, in at most `limit` groups.

    Groups are full module paths, if there are at most `limit`. Otherwise names without layer
    numbers (`transformer.h.*.mlp`) or cut at some depth are tried, and the names whose number of
    groups is nearest to `limit` are taken. If they are still too many, the most expensive groups
    are listed, and the last one is the rest.
    """
    counts = plan.schedule.recomputed(plan.graph)
    operations = plan.graph.operations
    paths = {op: operations[op].module for op in counts}
    best: dict[int, str] = {}
    for names in _module_groupings(paths):
        groups = len(set(names.values()))
        if not best or (groups <= limit and groups > len(set(best.values()))):
            best = names
        elif len(set(best.values())) > limit:
            best = min(best, names, key=lambda n: abs(len(set(n.values())) - limit))
    groups_by_name: dict[str, ModuleRecomputation] = {}
    for op in sorted(counts):
        group = groups_by_name.setdefault(best[op], ModuleRecomputation(best[op]))
        group.runs += counts[op]
        group.time_s += counts[op] * operations[op].cost_s
        group.size_bytes += counts[op] * sum(
            plan.graph.values[v].size_bytes for v in operations[op].outputs
        )
    if len(groups_by_name) <= limit:
        return list(groups_by_name.values())
    by_time = sorted(groups_by_name.values(), key=lambda group: -group.time_s)
    listed = {group.name for group in by_time[: limit - 1]}
    rest = ModuleRecomputation(f"{len(groups_by_name) - len(listed)} more")
    for group in by_time[limit - 1 :]:
        rest.runs += group.runs
        rest.time_s += group.time_s
        rest.size_bytes += group.size_bytes
    return [group for group in groups_by_name.values() if group.name in listed] + [rest]


def _module_groupings(paths: dict[int, str]) -> list[dict[int, str]]:
    """Return the possible group names of the operations, from the finest grouping to the coarsest.
    `paths` has the module path of each operation."""
    full = {op: path or "(no module)" for op, path in paths.items()}
    folded = {op: fold_layer_numbers(path) for op, path in paths.items()}
    groupings = [full, folded]
    for depth in range(_MAX_DEPTH, 0, -1):
        groupings += [
            {op: ".".join(path.split(".")[:depth]) for op, path in names.items()}
            for names in (full, folded)
        ]
    return groupings


def _recomputation_summary(plan: PlanData) -> str:
    """Return how much the plan recomputes in all, as text."""
    counts = plan.schedule.recomputed(plan.graph)
    if not counts:
        return "nothing is recomputed"
    extra_s = sum(plan.graph.operations[op].cost_s * times for op, times in counts.items())
    return (
        f"{format_seconds(extra_s)} in {sum(counts.values()):,} runs of {len(counts):,} "
        f"operations, {plan.overhead:.2%} of the step without recomputation"
    )
