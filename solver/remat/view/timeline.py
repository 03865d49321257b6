"""`timeline_svg`: memory over the step, stacked by what holds it, under the budget.

Behind the stack lies the curve without recomputation, over its own, shorter time. The picture has
at most 1,500 columns; a column shows the run with the most memory among those that touch it, so
that the peak is there however short it is, and a column's layers are those of one real moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from remat.budget import format_bytes, format_seconds
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.view import svg
from remat.view.axes import (
    Axis,
    bottom_axis,
    byte_ticks,
    decimal_ticks,
    left_axis,
    tick_bytes,
    tick_count,
    tick_seconds,
)
from remat.view.occupancy import LAYERS, backward_run, occupancy, starts_s
from remat.view.text import plain, shorten

MAX_COLUMNS = 1500
_WIDTH, _HEIGHT = 960.0, 400.0
_LEFT, _RIGHT, _TOP = 72.0, 16.0, 70.0
_MAX_TIPS = 240


def timeline_svg(plan: Plan, *, x: Literal["time", "runs"] = "time") -> str:
    """The picture as SVG text. `x` is what the horizontal axis counts: seconds, or runs (which it
    also counts where the plan takes no time)."""
    held = occupancy(plan)
    during = held.timeline.during_bytes
    eager = simulate(plan.graph, Schedule.keep_all(plan.graph)).during_bytes
    by_time = x == "time" and plan.time_s > 0
    starts = starts_s(plan) if by_time else _counts(len(during))
    eager_starts = (
        list(accumulate((o.cost_s for o in plan.graph.operations), initial=0.0))
        if by_time
        else _counts(len(eager))
    )
    end = max(starts[-1], eager_starts[-1])
    across = Axis(0, end, _LEFT, _WIDTH - _LEFT - _RIGHT)
    highest = max((*during, *eager, 1))
    fits = plan.budget_bytes <= 1.3 * highest
    top = max(highest, plan.budget_bytes if fits else 0)
    up = Axis(0, top * 1.06, _TOP + _HEIGHT, -_HEIGHT)
    columns = peaks(starts, during, end)
    body = [svg.text(_LEFT, 24, "Memory over the step", role="title"), _subtitle(plan)]
    body += left_axis(up, byte_ticks(top * 1.06), tick_bytes, _LEFT, _WIDTH - _RIGHT)
    shape = _steps(peaks(eager_starts, eager, end), eager, across, up)
    body.append(
        svg.path(shape, "eager", "without recomputation: " + format_bytes(max(eager, default=0)))
    )
    body += _stack(held.layers, held.used, columns, across, up)
    ticks = decimal_ticks(0, end)
    name = "time" if by_time else "runs"
    label = tick_seconds if by_time else tick_count
    body += bottom_axis(across, ticks, label, _TOP + _HEIGHT, name)
    body += _boundary(plan, starts, across)
    body += _peak(held.timeline.peak_run, during, starts, across, up)
    body += _budget(plan, up, fits)
    body += _tips(plan, columns, during, across)
    entries = [(layer, LAYERS[layer]) for layer in held.used]
    marks, bottom = svg.legend(
        [*entries, ("eager", "without recomputation")], _LEFT, _TOP + _HEIGHT + 56, _WIDTH - _LEFT
    )
    return svg.document(_WIDTH, bottom, "Memory over the step", _summary(plan), [*body, *marks])


def peaks(
    starts: Sequence[float], during: Sequence[int], end: float, columns: int = MAX_COLUMNS
) -> list[tuple[float, float, int]]:
    """At most `columns` columns (from, to, run), left to right: `run` has the most memory of those
    that touch the column. Neighbours that show the same run are one. `starts` has one entry more
    than there are runs, the end of the last."""
    if not during or end <= 0:
        return []
    best = [-1] * columns
    for run, memory in enumerate(during):
        first = min(columns - 1, int(starts[run] / end * columns))
        after = starts[run + 1] / end * columns
        last = min(columns - 1, max(first, -int(-after // 1) - 1))
        for column in range(first, last + 1):
            if best[column] < 0 or memory > during[best[column]]:
                best[column] = run
    found: list[tuple[float, float, int]] = []
    for column, run in enumerate(best):
        if run < 0:
            continue
        left, right = column * end / columns, (column + 1) * end / columns
        if found and found[-1][2] == run and found[-1][1] == left:
            found[-1] = (found[-1][0], right, run)
        else:
            found.append((left, right, run))
    return found


def _counts(runs: int) -> list[float]:
    return [float(run) for run in range(runs + 1)]


def _stack(
    layers: dict[str, list[int]],
    used: list[str],
    columns: list[tuple[float, float, int]],
    across: Axis,
    up: Axis,
) -> list[str]:
    """One path a layer. Each reaches down to zero, and the highest is drawn first."""
    total = [0] * len(next(iter(layers.values())))
    paths: list[str] = []
    for layer in used:
        held = layers[layer]
        total = [a + b for a, b in zip(total, held, strict=True)]
        tip = f"{LAYERS[layer]}: at most {format_bytes(max(held))}"
        paths.append(svg.path(_steps(columns, total, across, up), layer, tip))
    return paths[::-1]


def _steps(
    columns: list[tuple[float, float, int]], height: Sequence[int], across: Axis, up: Axis
) -> str:
    """The area under a staircase; steps too low to see are left out."""
    if not columns:
        return ""
    floor = svg.number(up.at(0))
    data = [f"M{svg.number(across.at(columns[0][0]))} {floor}"]
    level = floor
    for left, _, run in columns:
        y = svg.number(round(up.at(height[run]), 1))
        if y != level:
            data.append(f"H{svg.number(across.at(left))}V{y}")
            level = y
    data.append(f"H{svg.number(across.at(columns[-1][1]))}V{floor}Z")
    return "".join(data)


def _boundary(plan: Plan, starts: list[float], across: Axis) -> list[str]:
    run = backward_run(plan)
    if run is None:
        return []
    x = across.at(starts[run])
    y = _TOP - 12
    parts = [svg.line(x, y, x, _TOP + _HEIGHT, "mark", dash="2 4")]
    if x - _LEFT > 60:
        parts.append(svg.text(x - 6, y + 8, "forward", anchor="end"))
    if _WIDTH - _RIGHT - x > 60:
        parts.append(svg.text(x + 6, y + 8, "backward"))
    return parts


def _peak(
    run: int, during: Sequence[int], starts: list[float], across: Axis, up: Axis
) -> list[str]:
    if not during:
        return []
    x = across.at((starts[run] + starts[run + 1]) / 2)
    tip = svg.tooltip(f"peak: {format_bytes(during[run])} in run {run}")
    return [svg.element("circle", tip, cx=x, cy=up.at(during[run]), r=3.5, class_="remat-mark")]


def _budget(plan: Plan, up: Axis, fits: bool) -> list[str]:
    """The line with its label; only the label, at the top, where the budget is far above."""
    right = _WIDTH - _RIGHT
    words = f"budget {format_bytes(plan.budget_bytes)}"
    if not fits:
        return [svg.text(right, 42, f"{words}, far above", role="budget-label", anchor="end")]
    y = up.at(plan.budget_bytes)
    return [
        svg.element(
            "line",
            x1=_LEFT,
            y1=y,
            x2=right,
            y2=y,
            class_="remat-budget",
            stroke_dasharray="7 4",
            stroke_width=1.5,
        ),
        svg.text(right, y - 6, words, role="budget-label", anchor="end"),
    ]


def _tips(
    plan: Plan, columns: list[tuple[float, float, int]], during: Sequence[int], across: Axis
) -> list[str]:
    """Invisible strips that say what runs under the pointer."""
    stride = -(-len(columns) // _MAX_TIPS)
    parts: list[str] = []
    for first in range(0, len(columns), max(1, stride)):
        group = columns[first : first + stride]
        run = max((column[2] for column in group), key=lambda r: during[r])
        operation = plan.graph.operations[plan.schedule.runs[run]]
        left, right = across.at(group[0][0]), across.at(group[-1][1])
        where = f" in {shorten(plain(operation.module), 60)}" if operation.module else ""
        parts.append(
            svg.rectangle(
                left,
                _TOP,
                right - left,
                _HEIGHT,
                "hover",
                f"run {run}: {shorten(plain(operation.name), 60)}{where}, "
                f"{format_bytes(during[run])}",
            )
        )
    return parts


def _subtitle(plan: Plan) -> str:
    return svg.text(_LEFT, 42, _summary(plan))


def _summary(plan: Plan) -> str:
    peak, baseline = format_bytes(plan.peak_bytes), format_bytes(plan.baseline_peak_bytes)
    return (
        f"peak {peak} instead of {baseline}, time {format_seconds(plan.time_s)} instead of "
        f"{format_seconds(plan.baseline_time_s)} ({plan.overhead:+.2%})"
    )
