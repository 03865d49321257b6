"""Extra time against peak memory for many budgets, with the proved lower bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from remat.costs.devices import find_device
from remat.limits.units import format_bytes
from remat.plan_data import P, PlanData
from remat.report.comparison import ComparisonData, ComparisonRow
from remat.strategies.auto import Auto
from remat.view.picture import (
    PERCENT,
    Item,
    LegendEntry,
    Line,
    Mark,
    Note,
    Panel,
    Picture,
    Rule,
    Scale,
    byte_unit,
    strategy_mark,
)
from remat.view.timeline import BASELINE_LABEL

TITLE = "Extra time against peak memory"
_HEIGHT = 420.0
_NEAR = 0.003
"""Points closer than this share of both axes are at the same place."""

_TRIANGLE_HEIGHT = 0.985
"""The height of the triangles of points above the picture, as a share of the vertical axis."""

_CLIP_FACTOR, _CLIP_FACTOR_OF_MEDIAN = 1.5, 2.5
"""The vertical axis ends at the first number times the overhead of the most expensive plan or, if
no plan has overhead, at the second number times the median overhead of the strategies' points.
Without this, one expensive strategy would flatten the rest of the picture."""

_FAR_FACTOR = 1.5
"""A device with more memory than the largest peak times this is beyond the right edge."""

Point = tuple[float, float]
"""A point of the picture: peak in bytes, and extra time as a fraction."""


class StrategyPoint(NamedTuple):
    """The peak and overhead that a strategy reaches at one budget."""

    strategy: str
    peak_bytes: int
    overhead: float


def frontier_picture(
    plans: Sequence[PlanData],
    comparison: ComparisonData | Iterable[ComparisonRow] = (),
    capacity_bytes: int | None = None,
    device: str | None = None,
) -> Picture:
    """Return extra time against peak memory, for the arguments of `view.frontier_svg`."""
    if capacity_bytes is None and device is not None:
        capacity_bytes = find_device(device).memory_bytes
    plans = sorted(plans, key=lambda plan: (plan.peak_bytes, plan.overhead))
    rows = comparison.rows if isinstance(comparison, ComparisonData) else tuple(comparison)
    others = [(row.strategy, row.plan) for row in rows if row.plan is not None]
    points = [StrategyPoint(name, plan.peak_bytes, plan.overhead) for name, plan in others]
    points = list(dict.fromkeys(points))
    strategies = list(dict.fromkeys(point.strategy for point in points))
    all_plans = [*plans, *(plan for _, plan in others)]
    baseline_bytes = max((plan.baseline_peak_bytes for plan in all_plans), default=None)
    x = _memory_scale([plan.peak_bytes for plan in all_plans], baseline_bytes, capacity_bytes)
    high_overhead = _overhead_axis_end(plans, points)
    clipped = sorted((p for p in points if p.overhead > high_overhead), key=lambda p: p[1:])
    y = Scale(0, high_overhead * (1.1 if clipped else 1.0), PERCENT, "extra time (%)")
    items: list[Item] = []
    legend: list[LegendEntry] = []
    if plans:
        line = Line("line", _plan_staircase(plans), "plans")
        items.append(line)
        legend.append(LegendEntry("plans", mark=Mark(0, 0, 3.5, role="run"), line=line))
    bounds = [(float(p.peak_bytes), p.lower_bound) for p in plans if p.lower_bound is not None]
    if bounds:
        line = Line("bound", _bound_staircase(bounds), "lower bound", is_dashed=True)
        dot = Mark(0, 0, 2, role="bound-dot")
        items += [line, *(replace(dot, x=peak, y=bound) for peak, bound in bounds)]
        legend.append(LegendEntry("lower bound", mark=dot, line=line))
    if baseline_bytes is not None:
        tip = f"{BASELINE_LABEL}: peak {format_bytes(baseline_bytes)}"
        mark = Mark(baseline_bytes, 0, 4.5, tip, "baseline-dot")
        items.append(mark)
        legend.append(LegendEntry(BASELINE_LABEL, mark=replace(mark, tip=None)))
    shown = [point for point in points if point.overhead <= high_overhead]
    items += [
        *_strategy_marks(shown, strategies, x, y),
        *_clipped_point_marks(clipped, strategies, y),
    ]
    items += map(_plan_mark, plans)
    for index, name in enumerate(strategies):
        legend.append(LegendEntry(name, mark=strategy_mark(index, 0, 0)))
    corner_note = ""
    if capacity_bytes is not None:
        label = f"device {format_bytes(capacity_bytes)}"
        if capacity_bytes > x.high:
            corner_note = f"{label}, far beyond"
        else:
            items.append(Rule("budget", "x", capacity_bytes, label))
    summary = _frontier_summary(plans, strategies)
    return Picture(TITLE, summary, x, [Panel(y, _HEIGHT, items)], legend, corner_note)


def _memory_scale(
    peaks: list[int], baseline_bytes: int | None, capacity_bytes: int | None
) -> Scale:
    """Return the horizontal axis. It ends after the largest peak, or after the device's capacity
    unless that is far beyond. It starts at zero, or at a round number below the smallest peak if
    that is at least a fifth of the largest number."""
    peaks = [*peaks, *([baseline_bytes] if baseline_bytes else [])]
    high_bytes = max(peaks, default=1) or 1
    if capacity_bytes is not None and capacity_bytes <= _FAR_FACTOR * high_bytes:
        high_bytes = max(high_bytes, capacity_bytes)
    low_bytes, smallest = 0.0, min(peaks, default=0)
    if smallest >= 0.2 * high_bytes:
        low_bytes = (byte_unit(high_bytes).ticks(0, 0.94 * smallest, 6) or [0.0])[-1]
    unit = byte_unit(1.03 * high_bytes)
    return Scale(low_bytes, 1.03 * high_bytes, unit, f"peak memory ({unit.name})")


def _overhead_axis_end(plans: Sequence[PlanData], points: Sequence[StrategyPoint]) -> float:
    """Return the overhead at which the vertical axis ends; points above it are drawn as
    triangles."""
    plan_overhead = max((plan.overhead for plan in plans), default=0.0)
    overheads = [point.overhead for point in points if point.overhead > 0]
    high = max((plan_overhead, *overheads))
    if plan_overhead > 0:
        high = min(high, _CLIP_FACTOR * plan_overhead)
    elif overheads:
        high = min(high, _CLIP_FACTOR_OF_MEDIAN * median(overheads))
    return max(high, 0.001) * 1.05


def _plan_staircase(plans: Sequence[PlanData]) -> list[Point]:
    """Return the corners of the smallest known overhead for each peak, from plans sorted by peak. A
    plan is feasible for all larger peaks, so the line goes right, then down."""
    points = [(float(plan.peak_bytes), plan.overhead) for plan in plans]
    points.append((float(max(plan.baseline_peak_bytes for plan in plans)), 0.0))
    corners = points[:1]
    for (_, overhead), point in pairwise(points):
        corners += [(point[0], overhead), point]
    return corners


def _bound_staircase(points: list[Point]) -> list[Point]:
    """Return the corners of the proved lower bound, from points sorted by peak. A bound for a peak
    holds for all smaller peaks, so the line goes down, then right."""
    corners = points[:1]
    for (peak_bytes, _), point in pairwise(points):
        corners += [(peak_bytes, point[1]), point]
    return corners


def auto_plans_and_other_rows(
    comparison: ComparisonData[P],
) -> tuple[list[P], list[ComparisonRow[P]]]:
    """Return the plans of `Auto` in a comparison, which its picture shows as a line with lower
    bounds, and the rows of the other strategies, which it shows as points."""
    auto = [r.plan for r in comparison.rows if r.plan is not None and r.strategy == Auto.name]
    return auto, [row for row in comparison.rows if row.strategy != Auto.name]


def _strategy_marks(
    points: Sequence[StrategyPoint], strategies: list[str], x: Scale, y: Scale
) -> Iterator[Mark]:
    """Yield a marker for each point of a strategy. If several points are nearly at the same place,
    those after the first are rings around it."""
    places: list[Point] = []
    near_x, near_y = _NEAR * (x.high - x.low), _NEAR * y.high
    for strategy, peak_bytes, overhead in points:
        tip = f"{strategy}: {overhead:+.2%} at {format_bytes(peak_bytes)}"
        around = sum(abs(peak_bytes - a) < near_x and abs(overhead - b) < near_y for a, b in places)
        places.append((peak_bytes, overhead))
        mark = strategy_mark(strategies.index(strategy), peak_bytes, overhead, tip)
        ring = replace(mark, role="ring", radius=mark.radius + 3.0 * min(around, 3))
        yield ring if around else mark


def _clipped_point_marks(
    points: Sequence[StrategyPoint], strategies: list[str], y: Scale
) -> Iterator[Mark | Note]:
    """Yield triangles at the upper edge for points above it, and a note with each strategy's
    smallest overhead."""
    height = _TRIANGLE_HEIGHT * y.high
    smallest: dict[str, float] = {}
    for strategy, peak_bytes, overhead in points:
        tip = f"{strategy}: {overhead:+,.0%} at {format_bytes(peak_bytes)}"
        mark = strategy_mark(strategies.index(strategy), peak_bytes, height, tip)
        yield replace(mark, shape="^")
        smallest[strategy] = min(overhead, smallest.get(strategy, overhead))
    if points:
        order = sorted(smallest.items(), key=lambda item: item[1])
        names = ", ".join(f"{name} {overhead:+,.0%}" for name, overhead in order)
        yield Note(points[-1].peak_bytes, height, f"above: {names}", shift=12, lift=-4)


def _plan_mark(plan: PlanData) -> Mark:
    """Return a dot with a tooltip for a plan."""
    bound = f", at least {plan.lower_bound:+.2%}" if plan.lower_bound is not None else ""
    tip = (
        f"peak {format_bytes(plan.peak_bytes)} for the budget "
        f"{format_bytes(plan.requested_budget_bytes)}: {plan.overhead:+.2%}{bound}"
    )
    return Mark(plan.peak_bytes, plan.overhead, 3.5, tip, "run")


def _frontier_summary(plans: Sequence[PlanData], strategies: list[str]) -> str:
    """Return the number of plans and the first and last plan, as text; without plans the number of
    strategies."""
    if not plans:
        return f"{len(strategies)} strategies" if strategies else "no plans"
    first, last = plans[0], plans[-1]
    if len(plans) == 1:
        return f"1 plan, {first.overhead:+.2%} at {format_bytes(first.peak_bytes)}"
    return (
        f"{len(plans)} plans, from {first.overhead:+.2%} at {format_bytes(first.peak_bytes)} to "
        f"{last.overhead:+.2%} at {format_bytes(last.peak_bytes)}"
    )
