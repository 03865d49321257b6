"""`modules_svg`: how much time each module of the model spends on recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.report import fold_layer_numbers
from remat.view.drawing import svg
from remat.view.drawing.text import plain, shorten

MAX_BARS = 24
TITLE = "Recomputed time by module"
_WIDTH, _TOP, _ROW = 960.0, 64.0, 20.0
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


def modules_svg(plan: PlanData) -> str:
    """Return the picture of the recomputed time by module as SVG text: one bar per module, in the
    order of the model. Bars are seconds, or runs if recomputation takes no time."""
    modules = recomputation_by_module(plan)
    lengths = bar_lengths(modules)
    names = [shorten(plain(module.name), _MAX_NAME_LENGTH) for module in modules]
    labels = [bar_label(module) for module in modules]
    left = svg.MARGIN + svg.CHARACTER_WIDTH * max(map(len, names), default=0) + 10
    label_width = svg.CHARACTER_WIDTH * max(map(len, labels), default=0)
    scale = (_WIDTH - svg.MARGIN - left - 8 - label_width) / max(lengths, default=1.0)
    body = svg.heading(TITLE, summary(plan))
    for row, (module, name, length) in enumerate(zip(modules, names, lengths, strict=True)):
        y = _TOP + row * _ROW
        tip = f"{module.name}: {labels[row]}, {format_bytes(module.size_bytes)} recomputed"
        body += [
            svg.text(left - 8, y + 14, name, anchor="end", tip=module.name),
            svg.rectangle(left, y + 2, max(length * scale, 1.0), _ROW - 5, "recomputed", tip),
            svg.text(left + length * scale + 8, y + 14, labels[row]),
        ]
    height = _TOP + len(modules) * _ROW
    if modules:
        body.append(svg.line(left, _TOP, left, height, "axis"))
    return svg.document(_WIDTH, height + 12, TITLE, summary(plan), body)


def bar_lengths(modules: list[ModuleRecomputation]) -> list[float]:
    """Return the length of each module's bar: seconds, or runs if none takes time."""
    by_time = any(module.time_s > 0 for module in modules)
    return [module.time_s if by_time else float(module.runs) for module in modules]


def bar_label(module: ModuleRecomputation) -> str:
    """Return the recomputed time and the number of runs of a module, as text."""
    return f"{format_seconds(module.time_s)}, {module.runs:,} run{'s' if module.runs != 1 else ''}"


def recomputation_by_module(plan: PlanData, limit: int = MAX_BARS) -> list[ModuleRecomputation]:
    """Return the recomputations by module, in the order of the graph, in at most `limit` groups.

    Modules are grouped by the longest names that give few enough groups: full paths, paths without
    layer numbers (`transformer.h.*.mlp`), or paths cut at some depth. If all give too many, the
    most expensive groups are listed, and the last one is the rest.
    """
    counts = plan.schedule.recomputed(plan.graph)
    operations = plan.graph.operations
    paths = {op: operations[op].module for op in counts}
    best: dict[int, str] = {}
    for names in _groupings(paths):
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


def _groupings(paths: dict[int, str]) -> list[dict[int, str]]:
    """Return the possible group names of the operations, from the finest grouping to the coarsest,
    given the module path of each operation."""
    full = {op: path or "(no module)" for op, path in paths.items()}
    folded = {op: fold_layer_numbers(path) for op, path in paths.items()}
    groupings = [full, folded]
    for depth in range(_MAX_DEPTH, 0, -1):
        groupings += [
            {op: ".".join(path.split(".")[:depth]) for op, path in names.items()}
            for names in (full, folded)
        ]
    return groupings


def summary(plan: PlanData) -> str:
    """Return how much the plan recomputes in all, as text."""
    counts = plan.schedule.recomputed(plan.graph)
    if not counts:
        return "nothing is recomputed"
    extra_s = sum(plan.graph.operations[op].cost_s * times for op, times in counts.items())
    return (
        f"{format_seconds(extra_s)} in {sum(counts.values()):,} runs of {len(counts):,} "
        f"operations, {plan.overhead:.2%} of the step without recomputation"
    )
