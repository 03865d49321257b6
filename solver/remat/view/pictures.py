"""The pictures of plans as SVG text, and the same pictures as matplotlib figures.

Figures are for papers and notebooks; they raise `RematError` if matplotlib is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from remat.plan_data import PlanData
from remat.report.comparison import ComparisonData, ComparisonRow
from remat.view.figures import picture_figure
from remat.view.frontier import auto_plans_and_other_rows, frontier_picture
from remat.view.modules import modules_picture
from remat.view.schedule import schedule_picture
from remat.view.svg import picture_svg
from remat.view.timeline import timeline_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def timeline_svg(plan: PlanData, *, x: Literal["time", "runs"] = "time") -> str:
    """Return the picture of a plan's memory as SVG text. The horizontal axis counts seconds or, if
    `x` is "runs" or the plan takes no time, runs."""
    return picture_svg(timeline_picture(plan, x))


def timeline_figure(plan: PlanData, *, x: Literal["time", "runs"] = "time") -> Figure:
    """Return the picture of `timeline_svg` as a figure."""
    return picture_figure(timeline_picture(plan, x))


def schedule_svg(plan: PlanData) -> str:
    """Return the picture of a schedule as SVG text: runs from left to right, operations from top to
    bottom."""
    return picture_svg(schedule_picture(plan))


def schedule_figure(plan: PlanData) -> Figure:
    """Return the picture of `schedule_svg` as a figure."""
    return picture_figure(schedule_picture(plan))


def modules_svg(plan: PlanData) -> str:
    """Return the recomputed time by module as SVG text: one bar per module, in the order of the
    model. Bars are seconds, or runs if recomputation takes no time."""
    return picture_svg(modules_picture(plan))


def modules_figure(plan: PlanData) -> Figure:
    """Return the picture of `modules_svg` as a figure."""
    return picture_figure(modules_picture(plan))


def frontier_svg(
    plans: Sequence[PlanData],
    comparison: ComparisonData | Iterable[ComparisonRow] = (),
    capacity_bytes: int | None = None,
    *,
    device: str | None = None,
) -> str:
    """Return extra time against peak memory as SVG text, as in
    `frontier_svg(remat.sweep(t), remat.compare(t), device="h200")`.

    `plans` (as from `remat.sweep`) are one line, and their lower bounds a second, dashed one. Both
    are steps, because a plan is feasible for every larger budget and a bound holds for every
    smaller one; the optimum is between them. A `comparison` (or its rows) adds points with one
    marker per strategy; those far above the line are triangles at the upper edge. `capacity_bytes`,
    or the name of a `device`, adds a line at the device's memory.

    Raises `ValueError` for an unknown device.
    """
    return picture_svg(frontier_picture(plans, comparison, capacity_bytes, device))


def frontier_figure(
    plans: Sequence[PlanData],
    comparison: ComparisonData | Iterable[ComparisonRow] = (),
    capacity_bytes: int | None = None,
    *,
    device: str | None = None,
) -> Figure:
    """Return the picture of `frontier_svg`, with its arguments, as a figure."""
    return picture_figure(frontier_picture(plans, comparison, capacity_bytes, device))


def comparison_svg(comparison: ComparisonData, *, device: str | None = None) -> str:
    """Return the picture of a comparison as SVG text: the plans of `Auto` as the line with lower
    bounds, and those of the other strategies as points."""
    return frontier_svg(*auto_plans_and_other_rows(comparison), device=device)
