"""Memory over the step, stacked by what it is used for, under the budget.

Behind the stack is the memory of the baseline (without recomputation and offloading), whose time is
shorter. Below a step with offloaded tensors are its copies, the times at which it waits for them,
and the bytes on the host. The picture has at most 1,500 columns. A column shows the run with the
most memory among those that overlap it: so a short peak is visible, and the layers of a column
belong to one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import CopyTimes, without_offload_copies
from remat.plan_data import PlanData
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.view.memory import (
    LAYERS,
    first_backward_run,
    memory_layers,
    plan_copy_times,
    run_start_times_s,
)
from remat.view.picture import (
    RUNS,
    Area,
    Box,
    Item,
    LegendEntry,
    Mark,
    Note,
    Panel,
    Picture,
    RowLabel,
    Rule,
    Scale,
    byte_unit,
    second_unit,
)
from remat.view.text import plain_text, shorten_name

MAX_COLUMNS = 1500
BASELINE_LABEL = "without recomputation"
_HEIGHT = 400.0
_FAR_FACTOR = 1.3
"""A budget above the largest memory times this is written instead of drawn."""

_MAX_TIPS = 240

_LANE_HEIGHT, _LANE_GAP, _HOST_HEIGHT = 13.0, 5.0, 48.0
_LANE_ROLES = {"to host": "activations", "to device": "reloaded", "waiting": "waiting"}
"""The CSS role of each lane of copies."""

Columns = list[tuple[float, float, int]]
"""Columns of the picture from left to right: (left edge, right edge, run that is shown)."""


def timeline_picture(plan: PlanData, x: Literal["time", "runs"] = "time") -> Picture:
    """Return the picture of a plan's memory. The horizontal axis counts seconds or, if `x` is
    "runs" or the plan takes no time, runs."""
    memory = memory_layers(plan)
    during_bytes = memory.timeline.during_bytes
    eager = without_offload_copies(plan.graph) if plan.graph.renewal else plan.graph
    eager_bytes = simulate(eager, Schedule.keep_all(eager)).during_bytes
    by_time = x == "time" and plan.time_s > 0
    if by_time:
        starts = run_start_times_s(plan)
        eager_starts = list(accumulate((o.cost_s for o in eager.operations), initial=0.0))
    else:
        starts, eager_starts = (
            [float(run) for run in range(len(sizes) + 1)] for sizes in (during_bytes, eager_bytes)
        )
    end = max(starts[-1], eager_starts[-1])
    columns = peak_columns(starts, during_bytes, end)
    label = f"in pieces, {BASELINE_LABEL}" if plan.graph.splits else BASELINE_LABEL
    tip = f"{label}: {format_bytes(max(eager_bytes, default=0))}"
    eager_columns = peak_columns(eager_starts, eager_bytes, end)
    areas: list[Area] = []
    tops = [0] * len(during_bytes)
    for layer in memory.used:
        tops = [a + b for a, b in zip(tops, memory.layers[layer], strict=True)]
        layer_tip = f"{LAYERS[layer]}: at most {format_bytes(max(memory.layers[layer]))}"
        areas.append(Area(layer, _column_heights(columns, tops), layer_tip))
    # Each layer reaches down to zero, and the highest is drawn first.
    items: list[Item] = [
        Area("baseline", _column_heights(eager_columns, eager_bytes), tip),
        *areas[::-1],
    ]
    boundary = first_backward_run(plan)
    if boundary is not None:
        items.append(Rule("mark", "x", starts[boundary], "backward", "forward"))
    if during_bytes:
        run = memory.timeline.peak_run
        tip = f"peak: {format_bytes(during_bytes[run])} in run {run}"
        items.append(Mark((starts[run] + starts[run + 1]) / 2, during_bytes[run], 3.5, tip, "mark"))
    highest_bytes = max((*during_bytes, *eager_bytes, 1))
    budget = f"budget {format_bytes(plan.budget_bytes)}"
    is_budget_far = plan.budget_bytes > _FAR_FACTOR * highest_bytes
    if not is_budget_far:
        items.append(Rule("budget", "y", plan.budget_bytes, budget))
        highest_bytes = max(highest_bytes, plan.budget_bytes)
    top_bytes = highest_bytes * 1.06
    items += _run_tooltips(plan, columns, during_bytes, top_bytes)
    unit = byte_unit(top_bytes)
    panels = [Panel(Scale(0, top_bytes, unit, f"memory ({unit.name})"), _HEIGHT, items)]
    times = plan_copy_times(plan) if by_time else None
    if times is not None:
        panels += [_copy_lanes_panel(times), _host_memory_panel(times, end)]
    x_unit = second_unit(end) if by_time else RUNS
    legend = [LegendEntry(LAYERS[layer], layer) for layer in memory.used]
    return Picture(
        "Memory over the step",
        _peak_and_time_summary(plan),
        x=Scale(0, end or 1, x_unit, f"time ({x_unit.name})" if by_time else "runs"),
        panels=panels,
        legend=[*legend, LegendEntry(label, "baseline")],
        corner_note=f"{budget}, far above" if is_budget_far else "",
        min_left=68.0,
    )


def _copy_lanes_panel(times: CopyTimes) -> Panel:
    """Return a panel with one row of boxes for the copies in each direction and, if the step waits
    for any, a row for the waiting."""
    boxes: dict[str, list[tuple[float, float, str]]] = {"to host": [], "to device": []}
    for copy in times.copies:
        lane, seconds = copy.direction.replace("_", " "), format_seconds(copy.end_s - copy.start_s)
        tip = f"{copy.tensor} {lane}: {format_bytes(copy.size_bytes)} in {seconds}"
        boxes[lane].append((copy.start_s, copy.end_s, tip))
    for wait in times.waits:
        if wait.end_s > wait.start_s:
            tip = f"waits {format_seconds(wait.end_s - wait.start_s)} for {wait.tensor}"
            boxes.setdefault("waiting", []).append((wait.start_s, wait.end_s, tip))
    items: list[Box] = []
    rows: list[RowLabel] = []
    top = _LANE_GAP
    for name, spans in boxes.items():
        bottom = top + _LANE_HEIGHT
        rows.append(RowLabel(name, top, bottom))
        role = _LANE_ROLES[name]
        items += [Box(role, start_s, end_s, top, bottom, tip) for start_s, end_s, tip in spans]
        top = bottom + _LANE_GAP
    return Panel(Scale(top, 0), top, items, rows)


def _host_memory_panel(times: CopyTimes, end_s: float) -> Panel:
    """Return a panel with the bytes on the host over time, until `end_s`."""
    most_bytes = times.largest_host_bytes
    changes = [*times.host_bytes, (end_s, 0)]
    columns = [(s, after_s, size) for (s, size), (after_s, _) in pairwise(changes)]
    label = f"at most {format_bytes(most_bytes)}"
    items: list[Item] = [
        Area("on-host", columns, f"on the host: {label}"),
        Note(end_s, most_bytes, label, lift=-12, anchor="end"),
    ]
    row = RowLabel("on host", 0, most_bytes)
    return Panel(Scale(0, most_bytes or 1), _HOST_HEIGHT, items, [row])


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


def _column_heights(columns: Columns, heights: Sequence[int]) -> list[tuple[float, float, float]]:
    """Return (left, right, height) of each column; `heights` has the height of each run."""
    return [(left, right, heights[run]) for left, right, run in columns]


def _run_tooltips(
    plan: PlanData, columns: Columns, during: Sequence[int], top_bytes: float
) -> Iterator[Box]:
    """Yield invisible boxes over groups of columns, up to 240. The tooltip describes the group's
    run with the most memory."""
    stride = -(-len(columns) // _MAX_TIPS)
    for first in range(0, len(columns), max(1, stride)):
        group = columns[first : first + stride]
        run = max((column[2] for column in group), key=lambda r: during[r])
        operation = plan.graph.operations[plan.schedule.runs[run]]
        module = f" in {shorten_name(plain_text(operation.module), 60)}" if operation.module else ""
        name = shorten_name(plain_text(operation.name), 60)
        tip = f"run {run}: {name}{module}, {format_bytes(during[run])}"
        yield Box("hover", group[0][0], group[-1][1], top_bytes, 0, tip)


def _peak_and_time_summary(plan: PlanData) -> str:
    """Return the plan's peak and time and the baseline's, as text."""
    peak, baseline = format_bytes(plan.peak_bytes), format_bytes(plan.baseline_peak_bytes)
    return (
        f"peak {peak} instead of {baseline}, time {format_seconds(plan.time_s)} instead of "
        f"{format_seconds(plan.baseline_time_s)} ({plan.overhead:+.2%})"
    )
