"""`timeline_svg`: memory over the step, stacked by what holds it, under the budget.

Behind the stack lies the curve without recomputation, over its own, shorter time. The picture has
at most 1,500 columns; a column shows the run with the most memory among those that touch it, so
that the peak is there however short it is, and a column's layers are those of one real moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.view.drawing import svg
from remat.view.drawing.axes import (
    RUNS,
    Axis,
    Unit,
    bottom_axis,
    byte_unit,
    left_axis,
    passes,
    second_unit,
)
from remat.view.drawing.occupancy import LAYERS, Occupancy, backward_run, occupancy, starts_s
from remat.view.drawing.text import plain, shorten

MAX_COLUMNS = 1500
TITLE = "Memory over the step"
EAGER = "without recomputation"
_WIDTH, _HEIGHT = 960.0, 400.0
_LEFT, _RIGHT, _TOP = 60.0, 24.0, 88.0
_MAX_TIPS = 240

Columns = list[tuple[float, float, int]]
"""(from, to, run) each, left to right."""


@dataclass(frozen=True)
class Curves:
    """What the picture shows, in bytes over seconds or over runs.

    `starts` and `eager_starts` have one entry more than there are runs: the end of the last.
    `top_bytes` is the highest thing shown; `budget_fits` is False for a budget far above it.
    """

    held: Occupancy
    starts: list[float]
    eager_bytes: tuple[int, ...]
    eager_starts: list[float]
    by_time: bool
    top_bytes: int
    budget_fits: bool

    @property
    def during_bytes(self) -> tuple[int, ...]:
        return self.held.timeline.during_bytes

    @property
    def end(self) -> float:
        return max(self.starts[-1], self.eager_starts[-1])

    @property
    def unit(self) -> Unit:
        """What the horizontal axis counts in."""
        return second_unit(self.end) if self.by_time else RUNS

    def columns(self) -> Columns:
        return peaks(self.starts, self.during_bytes, self.end)

    def eager_columns(self) -> Columns:
        return peaks(self.eager_starts, self.eager_bytes, self.end)

    def tops(self) -> list[tuple[str, list[int]]]:
        """The layers that are used, bottom first, each with its upper edge run by run."""
        total = [0] * len(self.during_bytes)
        found: list[tuple[str, list[int]]] = []
        for layer in self.held.used:
            total = [a + b for a, b in zip(total, self.held.layers[layer], strict=True)]
            found.append((layer, total))
        return found


def curves(plan: PlanData, x: Literal["time", "runs"] = "time") -> Curves:
    """The memory of the plan, and that without recomputation over its own, shorter time."""
    held = occupancy(plan)
    during = held.timeline.during_bytes
    eager = simulate(plan.graph, Schedule.keep_all(plan.graph)).during_bytes
    by_time = x == "time" and plan.time_s > 0
    costs = (operation.cost_s for operation in plan.graph.operations)
    highest = max((*during, *eager, 1))
    fits = plan.budget_bytes <= 1.3 * highest
    return Curves(
        held=held,
        starts=starts_s(plan) if by_time else _counts(len(during)),
        eager_bytes=eager,
        eager_starts=list(accumulate(costs, initial=0.0)) if by_time else _counts(len(eager)),
        by_time=by_time,
        top_bytes=max(highest, plan.budget_bytes if fits else 0),
        budget_fits=fits,
    )


def timeline_svg(plan: PlanData, *, x: Literal["time", "runs"] = "time") -> str:
    """The picture as SVG text. `x` is what the horizontal axis counts: seconds, or runs (which it
    also counts where the plan takes no time)."""
    shown = curves(plan, x)
    during = shown.during_bytes
    across = Axis(0, shown.end, _LEFT, _WIDTH - _LEFT - _RIGHT)
    bottom, right = _TOP + _HEIGHT, _WIDTH - _RIGHT
    up = Axis(0, shown.top_bytes * 1.06, bottom, -_HEIGHT)
    columns = shown.columns()
    in_bytes = byte_unit(up.high)
    body = svg.heading(TITLE, summary(plan))
    body += left_axis(up, in_bytes, f"memory ({in_bytes.name})", _LEFT, right)
    shape = _steps(shown.eager_columns(), shown.eager_bytes, across, up)
    tip = f"{EAGER}: {format_bytes(max(shown.eager_bytes, default=0))}"
    body.append(svg.path(shape, "eager", tip))
    # Each layer reaches down to zero, and the highest is drawn first.
    for layer, top in reversed(shown.tops()):
        tip = f"{LAYERS[layer]}: at most {format_bytes(max(shown.held.layers[layer]))}"
        body.append(svg.path(_steps(columns, top, across, up), layer, tip))
    name = f"time ({shown.unit.name})" if shown.by_time else "runs"
    body += bottom_axis(across, shown.unit, shown.unit.ticks(0, shown.end), bottom, name)
    boundary = backward_run(plan)
    if boundary is not None:
        body += passes(across.at(shown.starts[boundary]), _LEFT, right, _TOP, bottom)
    body += _peak(shown.held.timeline.peak_run, during, shown.starts, across, up)
    body += _budget(plan, up, shown.budget_fits)
    body += _tips(plan, columns, during, across)
    entries = [(layer, LAYERS[layer]) for layer in shown.held.used]
    marks, below = svg.legend([*entries, ("eager", EAGER)], _LEFT, bottom + 62, _WIDTH - _LEFT)
    return svg.document(_WIDTH, below, TITLE, summary(plan), [*body, *marks])


def peaks(
    starts: Sequence[float], during: Sequence[int], end: float, columns: int = MAX_COLUMNS
) -> Columns:
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
    found: Columns = []
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


def _steps(columns: Columns, height: Sequence[int], across: Axis, up: Axis) -> str:
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


def _peak(
    run: int, during: Sequence[int], starts: list[float], across: Axis, up: Axis
) -> list[str]:
    if not during:
        return []
    x = across.at((starts[run] + starts[run + 1]) / 2)
    tip = svg.tooltip(f"peak: {format_bytes(during[run])} in run {run}")
    return [svg.element("circle", tip, cx=x, cy=up.at(during[run]), r=3.5, class_="remat-mark")]


def _budget(plan: PlanData, up: Axis, fits: bool) -> list[str]:
    """The line with its label; only the label, at the top, where the budget is far above."""
    right = _WIDTH - _RIGHT
    words = f"budget {format_bytes(plan.budget_bytes)}"
    if not fits:
        return [
            svg.text(right, svg.SUMMARY_Y, f"{words}, far above", role="budget-label", anchor="end")
        ]
    y = up.at(plan.budget_bytes)
    return [
        svg.line(_LEFT, y, right, y, "budget", dash="7 4", stroke_width=1.5),
        svg.text(right, y - 6, words, role="budget-label", anchor="end"),
    ]


def _tips(plan: PlanData, columns: Columns, during: Sequence[int], across: Axis) -> list[str]:
    """Invisible strips that say what runs under the pointer."""
    stride = -(-len(columns) // _MAX_TIPS)
    parts: list[str] = []
    for first in range(0, len(columns), max(1, stride)):
        group = columns[first : first + stride]
        run = max((column[2] for column in group), key=lambda r: during[r])
        operation = plan.graph.operations[plan.schedule.runs[run]]
        left, right = across.at(group[0][0]), across.at(group[-1][1])
        where = f" in {shorten(plain(operation.module), 60)}" if operation.module else ""
        name = shorten(plain(operation.name), 60)
        words = f"run {run}: {name}{where}, {format_bytes(during[run])}"
        parts.append(svg.rectangle(left, _TOP, right - left, _HEIGHT, "hover", words))
    return parts


def summary(plan: PlanData) -> str:
    """Peak and time, each with what it is relative to."""
    peak, baseline = format_bytes(plan.peak_bytes), format_bytes(plan.baseline_peak_bytes)
    return (
        f"peak {peak} instead of {baseline}, time {format_seconds(plan.time_s)} instead of "
        f"{format_seconds(plan.baseline_time_s)} ({plan.overhead:+.2%})"
    )
