"""The pictures as matplotlib figures, for papers: `figure.savefig("timeline.pdf")`.

They show the same data as the SVG pictures, with the same labels and colours. They change no global
state of matplotlib: no pyplot, no backend, no style. They need the extra `remat[viz]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from remat.errors import RematError
from remat.limits.units import format_bytes
from remat.plan_data import PlanData
from remat.report.comparison import ComparisonData, ComparisonRow
from remat.view import frontier, modules, schedule, timeline
from remat.view.drawing.axes import PERCENT, RUNS, Unit, byte_unit, second_unit
from remat.view.drawing.copy_lanes import CopyLanes, copy_lanes
from remat.view.drawing.marks import matplotlib_marker, strategy_colour
from remat.view.drawing.memory_layers import LAYERS, first_backward_run
from remat.view.drawing.schedule_grid import ROLES, ScheduleGrid, schedule_strokes
from remat.view.drawing.svg import colour
from remat.view.drawing.text import plain, shorten

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.2, 3.6
"""Size of a figure in inches; the width is that of a page of text."""

_COPIES_HEIGHT = 0.6
"""Height in inches of the copies of a plan with offloaded tensors."""

_SMALL, _TEXT = 7.0, 8.0
"""Font sizes in points."""

_ROW = 0.13
"""Height in inches of a row that has a label."""

_MIN_POINTS = {
    "live-result": 0.3,
    "live": 0.3,
    "live-recomputed": 0.7,
    "run": 0.7,
    "recomputation": 1.3,
}
"""The smallest width in points of a stroke of each role, so that a single recomputation is
visible."""

_MAX_VECTOR_STROKES = 20_000
"""With more strokes than this, a schedule is an image inside a PDF."""


def timeline_figure(plan: PlanData, *, x: Literal["time", "runs"] = "time") -> Figure:
    """Return the picture of memory over the step, as `timeline_svg`, but with only the largest
    number of bytes on the host. Raises `RematError` if matplotlib is not installed."""
    curves = timeline.memory_curves(plan, x)
    lanes = copy_lanes(plan) if curves.by_time else None
    height = _HEIGHT if lanes is None else _HEIGHT + _COPIES_HEIGHT
    figure, axes = _figure(timeline.TITLE, timeline.summary(plan), height)
    edges, columns = _edges(curves.baseline_columns())
    heights = [curves.baseline_bytes[run] for run in columns]
    if columns:
        label = curves.baseline_label
        axes.stairs(heights, edges, fill=True, color=colour("baseline"), label=label)
        axes.stairs(heights, edges, color="#b5b5b5", linewidth=0.5)
    edges, columns = _edges(curves.columns())
    below = [0] * len(columns)
    for layer, tops in curves.layer_tops() if columns else ():
        top = [tops[run] for run in columns]
        label = LAYERS[layer]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour(layer), label=label)
        below = top
    axes.set_xlim(0, curves.end or 1)
    axes.set_ylim(0, curves.top_bytes * 1.06)
    memory_unit = byte_unit(curves.top_bytes * 1.06)
    _ticks(axes, "y", memory_unit, f"memory ({memory_unit.name})")
    _ticks(axes, "x", curves.unit, f"time ({curves.unit.name})" if curves.by_time else "runs")
    if lanes is not None:
        _add_copy_axes(figure, axes, lanes)
    boundary = first_backward_run(plan)
    if boundary is not None:
        _pass_boundary(axes, curves.starts[boundary])
    label = f"budget {format_bytes(plan.budget_bytes)}"
    if curves.budget_fits:
        axes.axhline(plan.budget_bytes, color=colour("budget"), linewidth=1, linestyle=(0, (5, 3)))
        at_right = {"xycoords": axes.get_yaxis_transform(), "ha": "right"}
        _note(axes, label, (1, plan.budget_bytes), (0, 2), color=_LABEL_COLOUR, **at_right)
    else:
        axes.set_title(f"{label}, far above", loc="right", fontsize=_SMALL, color=_LABEL_COLOUR)
    run = curves.memory.timeline.peak_run
    if columns:
        middle = (curves.starts[run] + curves.starts[run + 1]) / 2
        axes.plot(middle, curves.during_bytes[run], "o", color=colour("mark"), markersize=3)
    _legend(figure, axes.get_legend_handles_labels()[0], 4 if lanes is None else 3)
    return figure


def _add_copy_axes(figure: Figure, memory_axes: Axes, lanes: CopyLanes) -> None:
    """Add axes with the lanes of copies below those of the memory, over the same seconds."""
    grid = figure.add_gridspec(2, 1, height_ratios=(_HEIGHT, _COPIES_HEIGHT))
    memory_axes.set_subplotspec(grid[0])
    axes = figure.add_subplot(grid[1], sharex=memory_axes)
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = list(lanes.lanes)
    for row, name in enumerate(names):
        spans = [(bar.start_s, bar.end_s - bar.start_s) for bar in lanes.lanes[name]]
        axes.broken_barh(spans, (row - 0.4, 0.8), color=colour(timeline.LANE_ROLES[name]))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names, fontsize=_SMALL)
    axes.tick_params(length=0, labelbottom=False)
    label = f"on the host: at most {format_bytes(lanes.times.largest_host_bytes)}"
    axes.set_title(label, loc="right", fontsize=_SMALL, color=colour("label"), pad=2)


def schedule_figure(plan: PlanData) -> Figure:
    """Return the picture of runs and live outputs, as `schedule_svg`. Raises `RematError` if
    matplotlib is not installed."""
    grid = ScheduleGrid.of(plan)
    height = min(max(grid.rows * _ROW, 1.0), 6.0)
    figure, axes = _figure(schedule.TITLE, schedule.summary(plan), height + 1.2)
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Patch

    row_points = height * 72 / max(grid.rows, 1)
    # Strokes count rows and columns, the axes operations and runs.
    runs_per_column = grid.runs / max(grid.columns, 1)
    lines_per_row = len(grid.lines) / max(grid.rows, 1)
    strokes_by_role = schedule_strokes(plan, grid)
    is_rasterized = sum(map(len, strokes_by_role.values())) > _MAX_VECTOR_STROKES
    for role, strokes in strokes_by_role.items():
        lines: list[list[tuple[float, float]]] = []
        for row, first, last in strokes:
            y = (row + 0.5) * lines_per_row
            lines.append([(first * runs_per_column, y), ((last + 1) * runs_per_column, y)])
        width = row_points * (0.8 if len(grid.lines) <= schedule.MAX_NAMED_ROWS else 1)
        min_width = _MIN_POINTS[role]
        axes.add_collection(
            LineCollection(
                lines,
                colors=colour(role),
                linewidths=max(width, min_width),
                capstyle="projecting" if width < min_width else "butt",
                rasterized=is_rasterized,
            )
        )
    axes.set_xlim(0, max(grid.runs, 1))
    axes.set_ylim(max(len(grid.lines), 1), 0)
    label_height = _SMALL * 1.3 / 72
    labels = schedule.row_labels(plan, grid, height / max(len(grid.lines), 1), label_height)
    middles = [(first + after) / 2 for _, first, after in labels]
    names = [shorten(plain(name), 28) for name, *_ in labels]
    axes.set_yticks(middles, names, fontsize=_SMALL, parse_math=False)
    axes.tick_params("y", length=0)
    axes.grid(False)
    axes.set_ylabel("operations", fontsize=_TEXT)
    _ticks(axes, "x", RUNS, "runs")
    boundary = first_backward_run(plan)
    if boundary is not None:
        _pass_boundary(axes, boundary)
    roles = [role for role in schedule.LEGEND if role in strokes_by_role]
    _legend(figure, [Patch(color=colour(role), label=ROLES[role]) for role in roles], 5)
    return figure


def frontier_figure(
    plans: Sequence[PlanData],
    comparison: ComparisonData | Iterable[ComparisonRow] = (),
    capacity_bytes: int | None = None,
    *,
    device: str | None = None,
) -> Figure:
    """Return extra time against peak memory, with the arguments and the content of `frontier_svg`.

    Raises `RematError` if matplotlib is not installed, and `ValueError` for an unknown device.
    """
    data = frontier.frontier_data(plans, comparison, capacity_bytes, device)
    figure, axes = _figure(frontier.TITLE, frontier.summary(data))
    axes.set_xlim(data.low_bytes, data.high_bytes)
    axes.set_ylim(0, data.top_overhead)
    if data.plans:
        xs, ys = zip(*data.plan_steps(), strict=True)
        axes.plot(xs, ys, color=colour("line"), linewidth=1.3)
        xs = [plan.peak_bytes for plan in data.plans]
        ys = [plan.overhead for plan in data.plans]
        axes.plot(xs, ys, "o", color=colour("line"), markersize=3.5, label=frontier.PLANS)
    if data.bound_points():
        xs, ys = zip(*data.bound_steps(), strict=True)
        axes.plot(xs, ys, "--", color=colour("bound"), linewidth=1, label=frontier.BOUND)
    if data.baseline_bytes is not None:
        dot = {"markerfacecolor": "white", "markeredgecolor": colour("mark"), "clip_on": False}
        label = timeline.BASELINE_LABEL
        axes.plot(data.baseline_bytes, 0, "o", markersize=6.5, label=label, **dot)
    for index, name in enumerate(data.strategies):
        points = [p for p in data.points if p.strategy == name and p.overhead <= data.high_overhead]
        axes.plot(
            [p.peak_bytes for p in points],
            [p.overhead for p in points],
            linestyle="none",
            marker=matplotlib_marker(index),
            color=strategy_colour(index),
            markeredgecolor=colour("point"),
            markeredgewidth=0.4,
            markersize=4.5,
            alpha=0.9,
            clip_on=False,
            label=name,
        )
    clipped_points = data.clipped_points()
    if clipped_points:
        last = max(point.peak_bytes for point in clipped_points)
        label = frontier.clipped_label(clipped_points)
        _note(axes, f"↑ {label}", (last, data.top_overhead), (0, -9), parse_math=False)
    if data.capacity_bytes is not None:
        label = f"device {format_bytes(data.capacity_bytes)}"
        if data.capacity_bytes > data.high_bytes:
            axes.set_title(
                f"{label}, far beyond", loc="right", fontsize=_SMALL, color=_LABEL_COLOUR
            )
        else:
            axes.axvline(
                data.capacity_bytes, color=colour("budget"), linewidth=1, linestyle=(0, (5, 3))
            )
            point = (data.capacity_bytes, data.top_overhead)
            _note(axes, label, point, (0, 3), ha="right", color=_LABEL_COLOUR)
    memory_unit = byte_unit(data.high_bytes)
    _ticks(axes, "x", memory_unit, f"peak memory ({memory_unit.name})")
    _ticks(axes, "y", PERCENT, "extra time (%)")
    for line in axes.lines:
        line.set_in_layout(False)  # markers on the edge are not clipped, and need no room
    _legend(figure, axes.get_legend_handles_labels()[0], 5)
    return figure


def modules_figure(plan: PlanData) -> Figure:
    """Return the recomputed time by module, as `modules_svg`. Raises `RematError` if matplotlib is
    not installed."""
    groups = modules.recomputation_by_module(plan)
    height = max(len(groups), 1) * _ROW * 1.35 + 0.9
    figure, axes = _figure(modules.TITLE, modules.summary(plan), height)
    lengths = modules.bar_lengths(groups)
    bars = axes.barh(range(len(groups)), lengths, 0.75, color=colour("recomputed"))
    names = [shorten(plain(group.name), 44) for group in groups]
    axes.set_yticks(range(len(groups)), names, fontsize=_SMALL, parse_math=False)
    axes.tick_params("y", length=0)
    labels = [modules.bar_label(group) for group in groups]
    axes.bar_label(bars, labels, padding=3, fontsize=_SMALL)
    axes.set_ylim(max(len(groups), 1) - 0.4, -0.6)
    longest = max(lengths, default=0.0) or 1.0
    axes.set_xlim(0, longest * 1.25)
    by_time = any(group.time_s > 0 for group in groups)
    unit = second_unit(longest) if by_time else RUNS
    _ticks(axes, "x", unit, f"time ({unit.name})" if by_time else "runs")
    axes.grid(False)
    return figure


_LABEL_COLOUR = colour("budget-label")


def _figure(title: str, summary: str, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    """Return an empty figure with its title, and its axes. Raises `RematError` if matplotlib is
    not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RematError(
            "figures need matplotlib, which is not installed: pip install 'remat[viz]'; the SVG "
            "pictures need nothing"
        ) from error
    figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(f"{title}: {summary}", fontsize=_TEXT, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=colour("grid"), linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def _ticks(axes: Axes, which: Literal["x", "y"], unit: Unit, name: str) -> None:
    """Set ticks at the places of the SVG picture, in the same unit."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    ticks = unit.ticks(low, high)
    axis.set_ticks(ticks, [unit.label(tick) for tick in ticks], fontsize=_SMALL)
    axis.set_tick_params(length=2 if which == "x" else 0)
    axis.set_label_text(name, fontsize=_TEXT)


def _edges(columns: timeline.Columns) -> tuple[list[float], list[int]]:
    """Return the edges of neighbouring columns, and the run that each column shows."""
    runs = [run for *_, run in columns]
    return [left for left, *_ in columns] + [right for _, right, _ in columns[-1:]], runs


def _pass_boundary(axes: Axes, x: float) -> None:
    """Draw the dotted line at `x`, where the backward pass starts, and label both sides."""
    axes.axvline(x, color=colour("mark"), linewidth=0.7, linestyle=":")
    for text, side, shift in (("forward", "right", -3), ("backward", "left", 3)):
        _note(axes, text, (x, 1), (shift, 2), xycoords=axes.get_xaxis_transform(), ha=side)


def _note(
    axes: Axes, text: str, point: tuple[float, float], shift: tuple[float, float], **options: Any
) -> None:
    """Write small text at a point of the axes, moved by `shift` in typographic points."""
    axes.annotate(text, point, xytext=shift, textcoords="offset points", fontsize=_SMALL, **options)


def _legend(figure: Figure, entries: Sequence[Artist], columns: int) -> None:
    """Add a legend below the axes, unless it would be empty."""
    if entries:
        figure.legend(
            handles=entries,
            loc="outside lower center",
            ncols=columns,
            fontsize=_SMALL,
            frameon=False,
        )
