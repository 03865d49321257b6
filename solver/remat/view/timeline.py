"""`timeline_svg`: memory over the step, stacked by what it is used for, under the budget.

Behind the stack is the memory of the baseline (without recomputation and offloading), whose time is
shorter. Below a step with offloaded tensors are its copies, the times at which it waits for them,
and the bytes on the host. The picture has at most 1,500 columns. A column shows the run with the
most memory among those that overlap it: so a short peak is visible, and the layers of a column
belong to one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import without_copies
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
    pass_boundary,
    second_unit,
)
from remat.view.drawing.copy_lanes import CopyLanes, copy_lanes
from remat.view.drawing.memory_layers import (
    LAYERS,
    MemoryLayers,
    first_backward_run,
    memory_layers,
    run_start_times_s,
)
from remat.view.drawing.text import plain, shorten

MAX_COLUMNS = 1500
TITLE = "Memory over the step"
BASELINE_LABEL = "without recomputation"
_WIDTH, _HEIGHT = 960.0, 400.0
_LEFT, _RIGHT, _TOP = 68.0, 24.0, 88.0
_MAX_TIPS = 240

_LANE_HEIGHT, _LANE_GAP, _HOST_HEIGHT = 13.0, 5.0, 48.0
_MIN_BAR_WIDTH = 0.8
LANE_ROLES = {"to host": "activations", "to device": "reloaded", "waiting": "waiting"}
"""The CSS role of each lane of copies."""

Columns = list[tuple[float, float, int]]
"""Columns of the picture from left to right: (left edge, right edge, run that is shown)."""


@dataclass(frozen=True)
class MemoryCurves:
    """The data of the picture: bytes over seconds, or over runs if `by_time` is False.

    `starts` are the starts of the plan's runs, `baseline_starts` those of the runs without
    recomputation; both end with the end of the last run. `top_bytes` is the largest number of bytes
    in the picture; `budget_fits` is False for a budget far above it.
    """

    memory: MemoryLayers
    starts: list[float]
    baseline_bytes: tuple[int, ...]
    baseline_starts: list[float]
    by_time: bool
    top_bytes: int
    budget_fits: bool
    baseline_label: str = BASELINE_LABEL

    @property
    def during_bytes(self) -> tuple[int, ...]:
        """The live bytes during each run of the plan."""
        return self.memory.timeline.during_bytes

    @property
    def end(self) -> float:
        """The right end of the horizontal axis."""
        return max(self.starts[-1], self.baseline_starts[-1])

    @property
    def unit(self) -> Unit:
        """The unit of the horizontal axis."""
        return second_unit(self.end) if self.by_time else RUNS

    def columns(self) -> Columns:
        """Return the columns of the plan."""
        return peak_columns(self.starts, self.during_bytes, self.end)

    def baseline_columns(self) -> Columns:
        """Return the columns of the baseline."""
        return peak_columns(self.baseline_starts, self.baseline_bytes, self.end)

    def layer_tops(self) -> list[tuple[str, list[int]]]:
        """Return (layer, height of its upper edge at each run), bottom first, without the layers
        that are always empty."""
        total = [0] * len(self.during_bytes)
        tops: list[tuple[str, list[int]]] = []
        for layer in self.memory.used:
            total = [a + b for a, b in zip(total, self.memory.layers[layer], strict=True)]
            tops.append((layer, total))
        return tops


def memory_curves(plan: PlanData, x: Literal["time", "runs"] = "time") -> MemoryCurves:
    """Return the memory of the plan and of the baseline, over time or over runs."""
    memory = memory_layers(plan)
    during = memory.timeline.during_bytes
    baseline_graph = without_copies(plan.graph) if plan.graph.renewal else plan.graph
    baseline = simulate(baseline_graph, Schedule.keep_all(baseline_graph)).during_bytes
    by_time = x == "time" and plan.time_s > 0
    costs = (operation.cost_s for operation in baseline_graph.operations)
    highest_bytes = max((*during, *baseline, 1))
    budget_fits = plan.budget_bytes <= 1.3 * highest_bytes
    return MemoryCurves(
        memory=memory,
        starts=run_start_times_s(plan) if by_time else _run_numbers(len(during)),
        baseline_bytes=baseline,
        baseline_starts=(
            list(accumulate(costs, initial=0.0)) if by_time else _run_numbers(len(baseline))
        ),
        by_time=by_time,
        top_bytes=max(highest_bytes, plan.budget_bytes if budget_fits else 0),
        budget_fits=budget_fits,
        baseline_label=f"in pieces, {BASELINE_LABEL}" if plan.graph.splits else BASELINE_LABEL,
    )


def timeline_svg(plan: PlanData, *, x: Literal["time", "runs"] = "time") -> str:
    """Return the picture of a plan's memory as SVG text. The horizontal axis counts seconds or, if
    `x` is "runs" or the plan takes no time, runs."""
    curves = memory_curves(plan, x)
    during = curves.during_bytes
    x_axis = Axis(0, curves.end, _LEFT, _WIDTH - _LEFT - _RIGHT)
    bottom, right = _TOP + _HEIGHT, _WIDTH - _RIGHT
    y_axis = Axis(0, curves.top_bytes * 1.06, bottom, -_HEIGHT)
    columns = curves.columns()
    memory_unit = byte_unit(y_axis.high)
    body = svg.heading(TITLE, summary(plan))
    body += left_axis(y_axis, memory_unit, f"memory ({memory_unit.name})", _LEFT, right)
    area = _staircase_area(curves.baseline_columns(), curves.baseline_bytes, x_axis, y_axis)
    tip = f"{curves.baseline_label}: {format_bytes(max(curves.baseline_bytes, default=0))}"
    body.append(svg.path(area, "baseline", tip))
    # Each layer reaches down to zero, and the highest is drawn first.
    for layer, top in reversed(curves.layer_tops()):
        tip = f"{LAYERS[layer]}: at most {format_bytes(max(curves.memory.layers[layer]))}"
        body.append(svg.path(_staircase_area(columns, top, x_axis, y_axis), layer, tip))
    name = f"time ({curves.unit.name})" if curves.by_time else "runs"
    lanes = copy_lanes(plan) if curves.by_time else None
    lowest = bottom
    if lanes is not None:
        body.append(svg.line(_LEFT, bottom, right, bottom, "axis"))
        strip, lowest = _copy_strip(lanes, x_axis, bottom)
        body += strip
    body += bottom_axis(x_axis, curves.unit, curves.unit.ticks(0, curves.end), lowest, name)
    boundary = first_backward_run(plan)
    if boundary is not None:
        body += pass_boundary(x_axis.at(curves.starts[boundary]), _LEFT, right, _TOP, lowest)
    body += _peak(curves.memory.timeline.peak_run, during, curves.starts, x_axis, y_axis)
    body += _budget(plan, y_axis, curves.budget_fits)
    body += _tips(plan, columns, during, x_axis)
    entries = [(layer, LAYERS[layer]) for layer in curves.memory.used]
    entries.append(("baseline", curves.baseline_label))
    legend, below = svg.legend(entries, _LEFT, lowest + 62, _WIDTH - _LEFT)
    return svg.document(_WIDTH, below, TITLE, summary(plan), [*body, *legend])


def _copy_strip(lanes: CopyLanes, x_axis: Axis, top: float) -> tuple[list[str], float]:
    """Return the lanes of the copies below `top`, with the bytes on the host below them, and the y
    of their lower edge."""
    parts: list[str] = []
    y = top + _LANE_GAP
    for name, bars in lanes.lanes.items():
        parts.append(svg.text(_LEFT - 6, y + _LANE_HEIGHT - 3, name, anchor="end"))
        for bar in bars:
            left = x_axis.at(bar.start_s)
            width = max(x_axis.at(bar.end_s) - left, _MIN_BAR_WIDTH)
            role = LANE_ROLES[name]
            parts.append(svg.rectangle(left, y, width, _LANE_HEIGHT, role, bar.tip))
        y += _LANE_HEIGHT + _LANE_GAP
    most_bytes = lanes.times.largest_host_bytes
    bottom = y + _HOST_HEIGHT
    host_axis = Axis(0, most_bytes, bottom, -_HOST_HEIGHT)
    changes = [*lanes.times.host_bytes, (x_axis.high, 0)]
    columns = [(s, after_s, i) for i, ((s, _), (after_s, _)) in enumerate(pairwise(changes))]
    heights = [size for _, size in lanes.times.host_bytes]
    area = _staircase_area(columns, heights, x_axis, host_axis)
    parts.append(svg.path(area, "on-host", f"on the host: at most {format_bytes(most_bytes)}"))
    parts.append(svg.text(_LEFT - 6, bottom - _HOST_HEIGHT / 2 + 4, "on host", anchor="end"))
    label = f"at most {format_bytes(most_bytes)}"
    parts.append(svg.text(x_axis.at(x_axis.high), y + 12, label, anchor="end"))
    return parts, bottom


def peak_columns(
    starts: Sequence[float], during: Sequence[int], end: float, columns: int = MAX_COLUMNS
) -> Columns:
    """Return at most `columns` columns, each with the run that has the most memory of those that
    overlap it. Neighbours that show the same run are merged. `during` is the memory of each run;
    `starts` are their starts, and the end of the last run."""
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
    merged: Columns = []
    for column, run in enumerate(best):
        if run < 0:
            continue
        left, right = column * end / columns, (column + 1) * end / columns
        if merged and merged[-1][2] == run and merged[-1][1] == left:
            merged[-1] = (merged[-1][0], right, run)
        else:
            merged.append((left, right, run))
    return merged


def _run_numbers(runs: int) -> list[float]:
    """Return 0, 1, ..., `runs`: the starts of the runs if each is one unit long."""
    return [float(run) for run in range(runs + 1)]


def _staircase_area(columns: Columns, heights: Sequence[int], x_axis: Axis, y_axis: Axis) -> str:
    """Return the path data of the area below a staircase, without steps that are too low to see.
    `heights` is indexed by run."""
    if not columns:
        return ""
    floor = svg.number(y_axis.at(0))
    data = [f"M{svg.number(x_axis.at(columns[0][0]))} {floor}"]
    level = floor
    for left, _, run in columns:
        y = svg.number(round(y_axis.at(heights[run]), 1))
        if y != level:
            data.append(f"H{svg.number(x_axis.at(left))}V{y}")
            level = y
    data.append(f"H{svg.number(x_axis.at(columns[-1][1]))}V{floor}Z")
    return "".join(data)


def _peak(
    run: int, during: Sequence[int], starts: list[float], x_axis: Axis, y_axis: Axis
) -> list[str]:
    """Return the dot at the peak, which is in `run`."""
    if not during:
        return []
    x = x_axis.at((starts[run] + starts[run + 1]) / 2)
    tip = svg.tooltip(f"peak: {format_bytes(during[run])} in run {run}")
    return [svg.element("circle", tip, cx=x, cy=y_axis.at(during[run]), r=3.5, class_="remat-mark")]


def _budget(plan: PlanData, y_axis: Axis, fits: bool) -> list[str]:
    """Return the line of the budget and its label; if the budget is far above the picture, only
    the label at the top."""
    right = _WIDTH - _RIGHT
    label = f"budget {format_bytes(plan.budget_bytes)}"
    if not fits:
        return [
            svg.text(right, svg.SUMMARY_Y, f"{label}, far above", role="budget-label", anchor="end")
        ]
    y = y_axis.at(plan.budget_bytes)
    return [
        svg.line(_LEFT, y, right, y, "budget", dash="7 4", stroke_width=1.5),
        svg.text(right, y - 6, label, role="budget-label", anchor="end"),
    ]


def _tips(plan: PlanData, columns: Columns, during: Sequence[int], x_axis: Axis) -> list[str]:
    """Return invisible strips whose tooltips name the run under the pointer."""
    stride = -(-len(columns) // _MAX_TIPS)
    parts: list[str] = []
    for first in range(0, len(columns), max(1, stride)):
        group = columns[first : first + stride]
        run = max((column[2] for column in group), key=lambda r: during[r])
        operation = plan.graph.operations[plan.schedule.runs[run]]
        left, right = x_axis.at(group[0][0]), x_axis.at(group[-1][1])
        module = f" in {shorten(plain(operation.module), 60)}" if operation.module else ""
        name = shorten(plain(operation.name), 60)
        tip = f"run {run}: {name}{module}, {format_bytes(during[run])}"
        parts.append(svg.rectangle(left, _TOP, right - left, _HEIGHT, "hover", tip))
    return parts


def summary(plan: PlanData) -> str:
    """Return the plan's peak and time, and those without recomputation, as text."""
    peak, baseline = format_bytes(plan.peak_bytes), format_bytes(plan.baseline_peak_bytes)
    return (
        f"peak {peak} instead of {baseline}, time {format_seconds(plan.time_s)} instead of "
        f"{format_seconds(plan.baseline_time_s)} ({plan.overhead:+.2%})"
    )
