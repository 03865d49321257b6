"""The pictures as matplotlib figures, for papers: `figure.savefig("timeline.pdf")`.

They show what the SVGs show, from the same data, in the same words and colours. No global state of
matplotlib is touched: no pyplot, no backend, no style. Needs the extra `remat[viz]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from remat.errors import RematError
from remat.limits.units import format_bytes
from remat.plan_data import PlanData
from remat.report.comparison import Compared, Row
from remat.view import frontier as frontiers
from remat.view import modules, schedule, timeline
from remat.view.drawing.axes import PERCENT, RUNS, Unit, byte_unit, second_unit
from remat.view.drawing.cells import ROLES, Grid, strokes
from remat.view.drawing.marks import marker, series
from remat.view.drawing.occupancy import LAYERS, backward_run
from remat.view.drawing.svg import colour
from remat.view.drawing.text import plain, shorten

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.2, 3.6
"""Inches: the width of a page of text."""

_SMALL, _TEXT = 7.0, 8.0
"""Points."""

_ROW = 0.13
"""Inches of a row that has a label."""

_LEAST_POINTS = {"held-result": 0.3, "held": 0.3, "held-again": 0.7, "run": 0.7, "rerun": 1.3}
"""Strokes are no thinner than this: what is rare is the point of the picture."""

_VECTORS = 20_000
"""With more strokes than this a schedule is an image inside a PDF."""


def timeline_figure(plan: PlanData, *, x: Literal["time", "runs"] = "time") -> Figure:
    """Memory over the step, as `timeline_svg`. Raises `RematError` without matplotlib."""
    figure, axes = _figure(timeline.TITLE, timeline.summary(plan))
    shown = timeline.curves(plan, x)
    edges, columns = _edges(shown.eager_columns())
    heights = [shown.eager_bytes[run] for run in columns]
    if columns:
        axes.stairs(heights, edges, fill=True, color=colour("eager"), label=timeline.EAGER)
        axes.stairs(heights, edges, color="#b5b5b5", linewidth=0.5)
    edges, columns = _edges(shown.columns())
    below = [0] * len(columns)
    for layer, tops in shown.tops() if columns else ():
        top = [tops[run] for run in columns]
        words = LAYERS[layer]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour(layer), label=words)
        below = top
    axes.set_xlim(0, shown.end or 1)
    axes.set_ylim(0, shown.top_bytes * 1.06)
    in_bytes = byte_unit(shown.top_bytes * 1.06)
    _ticks(axes, "y", in_bytes, f"memory ({in_bytes.name})")
    _ticks(axes, "x", shown.unit, f"time ({shown.unit.name})" if shown.by_time else "runs")
    boundary = backward_run(plan)
    if boundary is not None:
        _passes(axes, shown.starts[boundary])
    words = f"budget {format_bytes(plan.budget_bytes)}"
    if shown.budget_fits:
        axes.axhline(plan.budget_bytes, color=colour("budget"), linewidth=1, linestyle=(0, (5, 3)))
        at_right = {"xycoords": axes.get_yaxis_transform(), "ha": "right"}
        _note(axes, words, (1, plan.budget_bytes), (0, 2), color=_LABEL_COLOUR, **at_right)
    else:
        axes.set_title(f"{words}, far above", loc="right", fontsize=_SMALL, color=_LABEL_COLOUR)
    run = shown.held.timeline.peak_run
    if columns:
        middle = (shown.starts[run] + shown.starts[run + 1]) / 2
        axes.plot(middle, shown.during_bytes[run], "o", color=colour("mark"), markersize=3)
    _legend(figure, axes.get_legend_handles_labels()[0], 4)
    return figure


def schedule_figure(plan: PlanData) -> Figure:
    """What runs when and what is held when, as `schedule_svg`. Raises `RematError`."""
    grid = Grid(len(plan.graph), len(plan.schedule))
    tall = min(max(grid.rows * _ROW, 1.0), 6.0)
    figure, axes = _figure(schedule.TITLE, schedule.summary(plan), tall + 1.2)
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Patch

    row = tall * 72 / max(grid.rows, 1)
    # Cells count in rows and columns; the axes in operations and runs.
    across, down = grid.runs / max(grid.columns, 1), grid.operations / max(grid.rows, 1)
    found = strokes(plan, grid)
    words = {ROLES[role] for role in found}
    many = sum(map(len, found.values())) > _VECTORS
    for role, cells in found.items():
        lines = [
            ((first * across, (at + 0.5) * down), ((last + 1) * across, (at + 0.5) * down))
            for at, first, last in cells
        ]
        wide = row * (0.8 if grid.operations <= schedule.NAMED else 1)
        least = _LEAST_POINTS[role]
        axes.add_collection(
            LineCollection(
                lines,
                colors=colour(role),
                linewidths=max(wide, least),
                capstyle="projecting" if wide < least else "butt",
                rasterized=many,
            )
        )
    axes.set_xlim(0, max(grid.runs, 1))
    axes.set_ylim(max(grid.operations, 1), 0)
    label_height = _SMALL * 1.3 / 72
    labels = schedule.row_labels(plan, tall / max(grid.operations, 1), label_height)
    middles = [(first + after) / 2 for _, first, after in labels]
    names = [shorten(plain(name), 28) for name, *_ in labels]
    axes.set_yticks(middles, names, fontsize=_SMALL, parse_math=False)
    axes.tick_params("y", length=0)
    axes.grid(False)
    axes.set_ylabel("operations", fontsize=_TEXT)
    _ticks(axes, "x", RUNS, "runs")
    boundary = backward_run(plan)
    if boundary is not None:
        _passes(axes, boundary)
    swatches = [Patch(color=colour(role), label=ROLES[role]) for role in schedule.LEGEND]
    _legend(figure, [swatch for swatch in swatches if swatch.get_label() in words], 5)
    return figure


def frontier_figure(
    plans: Sequence[PlanData],
    comparison: Compared | Iterable[Row] = (),
    capacity_bytes: int | None = None,
    *,
    device: str | None = None,
) -> Figure:
    """Extra time against peak memory; arguments and picture are those of `frontier_svg`.

    Raises `RematError` without matplotlib, and `ValueError` for an unknown device.
    """
    shown = frontiers.frontier(plans, comparison, capacity_bytes, device)
    figure, axes = _figure(frontiers.TITLE, frontiers.summary(shown))
    axes.set_xlim(shown.low_bytes, shown.high_bytes)
    axes.set_ylim(0, shown.top_overhead)
    if shown.line:
        xs, ys = zip(*shown.plans(), strict=True)
        axes.plot(xs, ys, color=colour("line"), linewidth=1.3)
        xs = [plan.peak_bytes for plan in shown.line]
        ys = [plan.overhead for plan in shown.line]
        axes.plot(xs, ys, "o", color=colour("line"), markersize=3.5, label=frontiers.PLANS)
    if shown.bounds():
        xs, ys = zip(*shown.bound(), strict=True)
        axes.plot(xs, ys, "--", color=colour("bound"), linewidth=1, label=frontiers.BOUND)
    if shown.eager_bytes is not None:
        dot = {"markerfacecolor": "white", "markeredgecolor": colour("mark"), "clip_on": False}
        axes.plot(shown.eager_bytes, 0, "o", markersize=6.5, label=timeline.EAGER, **dot)
    for index, name in enumerate(shown.strategies):
        own = [p for p in shown.points if p.strategy == name]
        inside = [p for p in own if p.overhead <= shown.high_overhead]
        axes.plot(
            [p.peak_bytes for p in inside],
            [p.overhead for p in inside],
            linestyle="none",
            marker=marker(index),
            color=series(index),
            markeredgecolor=colour("point"),
            markeredgewidth=0.4,
            markersize=4.5,
            alpha=0.9,
            clip_on=False,
            label=name,
        )
    above = shown.above()
    if above:
        last = max(point.peak_bytes for point in above)
        words = frontiers.above_words(above)
        _note(axes, f"↑ {words}", (last, shown.top_overhead), (0, -9), parse_math=False)
    if shown.capacity_bytes is not None:
        words = f"device {format_bytes(shown.capacity_bytes)}"
        if shown.capacity_bytes > shown.high_bytes:
            axes.set_title(
                f"{words}, far beyond", loc="right", fontsize=_SMALL, color=_LABEL_COLOUR
            )
        else:
            axes.axvline(
                shown.capacity_bytes, color=colour("budget"), linewidth=1, linestyle=(0, (5, 3))
            )
            place = (shown.capacity_bytes, shown.top_overhead)
            _note(axes, words, place, (0, 3), ha="right", color=_LABEL_COLOUR)
    in_bytes = byte_unit(shown.high_bytes)
    _ticks(axes, "x", in_bytes, f"peak memory ({in_bytes.name})")
    _ticks(axes, "y", PERCENT, "extra time (%)")
    for line in axes.lines:
        line.set_in_layout(False)  # marks on the edge are not clipped, and need no room
    _legend(figure, axes.get_legend_handles_labels()[0], 5)
    return figure


def modules_figure(plan: PlanData) -> Figure:
    """Recomputed time by module, as `modules_svg`. Raises `RematError` without matplotlib."""
    found = modules.shares(plan)
    tall = max(len(found), 1) * _ROW * 1.35 + 0.9
    figure, axes = _figure(modules.TITLE, modules.summary(plan), tall)
    lengths = modules.bars(found)
    drawn = axes.barh(range(len(found)), lengths, 0.75, color=colour("again"))
    names = [shorten(plain(share.name), 44) for share in found]
    axes.set_yticks(range(len(found)), names, fontsize=_SMALL, parse_math=False)
    axes.tick_params("y", length=0)
    axes.bar_label(drawn, [modules.cost(share) for share in found], padding=3, fontsize=_SMALL)
    axes.set_ylim(max(len(found), 1) - 0.4, -0.6)
    longest = max(lengths, default=0.0) or 1.0
    axes.set_xlim(0, longest * 1.25)
    by_time = any(share.time_s > 0 for share in found)
    unit = second_unit(longest) if by_time else RUNS
    _ticks(axes, "x", unit, f"time ({unit.name})" if by_time else "runs")
    axes.grid(False)
    return figure


_LABEL_COLOUR = colour("budget-label")


def _figure(title: str, summary: str, height: float = _HEIGHT) -> tuple[Figure, Axes]:
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
    """Ticks where the SVG has them, in the same unit."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    at = unit.ticks(low, high)
    axis.set_ticks(at, [unit.label(tick) for tick in at], fontsize=_SMALL)
    axis.set_tick_params(length=2 if which == "x" else 0)
    axis.set_label_text(name, fontsize=_TEXT)


def _edges(columns: timeline.Columns) -> tuple[list[float], list[int]]:
    """Edges of neighbouring columns, and the run that each shows."""
    runs = [run for *_, run in columns]
    return [left for left, *_ in columns] + [right for _, right, _ in columns[-1:]], runs


def _passes(axes: Axes, x: float) -> None:
    axes.axvline(x, color=colour("mark"), linewidth=0.7, linestyle=":")
    for words, side, shift in (("forward", "right", -3), ("backward", "left", 3)):
        _note(axes, words, (x, 1), (shift, 2), xycoords=axes.get_xaxis_transform(), ha=side)


def _note(
    axes: Axes, words: str, place: tuple[float, float], shift: tuple[float, float], **options: Any
) -> None:
    """Small words at a place, moved by some points."""
    axes.annotate(
        words, place, xytext=shift, textcoords="offset points", fontsize=_SMALL, **options
    )


def _legend(figure: Figure, entries: Sequence[Artist], columns: int) -> None:
    """Below the axes, in rows."""
    if entries:
        figure.legend(
            handles=entries,
            loc="outside lower center",
            ncols=columns,
            fontsize=_SMALL,
            frameon=False,
        )
