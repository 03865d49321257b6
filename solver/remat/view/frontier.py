"""`frontier_svg`: extra time against peak memory for many budgets, with the proved lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from remat.costs.devices import find_device
from remat.limits.units import format_bytes
from remat.plan_data import P, PlanData
from remat.report.comparison import ComparisonData, ComparisonRow
from remat.strategies.auto import Auto
from remat.view.drawing import svg
from remat.view.drawing.axes import PERCENT, Axis, bottom_axis, byte_unit, left_axis
from remat.view.drawing.marks import strategy_mark, strategy_ring, strategy_triangle
from remat.view.timeline import BASELINE_LABEL

TITLE = "Extra time against peak memory"
PLANS, BOUND = "plans", "lower bound"
_WIDTH, _HEIGHT = 960.0, 420.0
_LEFT, _RIGHT, _TOP = 60.0, 24.0, 88.0
_CLIP_FACTOR, _CLIP_FACTOR_OF_MEDIAN = 1.5, 2.5
"""The vertical axis ends at the first number times the overhead of the most expensive plan or, if
no plan has overhead, at the second number times the median overhead of the strategies' points.
Without this, one expensive strategy would flatten the rest of the picture."""

_FAR_FACTOR = 1.5
"""A device with more memory than the largest peak times this is beyond the right edge."""

PeakAndOverhead = tuple[float, float]
"""A point of the picture: peak in bytes, and extra time as a fraction."""


@dataclass(frozen=True)
class BaselinePoint:
    """The peak and overhead that a strategy reaches at one budget."""

    strategy: str
    peak_bytes: int
    overhead: float


@dataclass(frozen=True)
class FrontierData:
    """The data of the picture: plans in order of their peak, points of other strategies, and the
    ranges of the axes. `baseline_bytes` is the peak without recomputation."""

    plans: list[PlanData]
    points: list[BaselinePoint]
    baseline_bytes: int | None
    capacity_bytes: int | None
    low_bytes: float
    high_bytes: float
    high_overhead: float

    @property
    def top_overhead(self) -> float:
        """The upper end of the vertical axis, with room for the markers of clipped points."""
        return self.high_overhead * (1.1 if self.clipped_points() else 1.0)

    @property
    def strategies(self) -> list[str]:
        """The names of the strategies that have points."""
        return list(dict.fromkeys(point.strategy for point in self.points))

    def plan_steps(self) -> list[PeakAndOverhead]:
        """Return the corners of the staircase of the smallest known overhead for each peak. A plan
        is feasible for all larger peaks, so steps go right, then down."""
        points = [(float(plan.peak_bytes), plan.overhead) for plan in self.plans]
        if self.baseline_bytes is not None and points:
            points.append((float(self.baseline_bytes), 0.0))
        corners = points[:1]
        for (_, overhead), point in pairwise(points):
            corners += [(point[0], overhead), point]
        return corners

    def bound_points(self) -> list[PeakAndOverhead]:
        """Return the proved lower bounds, at the peaks of their plans."""
        return [
            (float(plan.peak_bytes), plan.lower_bound)
            for plan in self.plans
            if plan.lower_bound is not None
        ]

    def bound_steps(self) -> list[PeakAndOverhead]:
        """Return the corners of the staircase of the proved lower bound. A bound for a peak holds
        for all smaller peaks, so steps go down, then right."""
        points = self.bound_points()
        corners = points[:1]
        for (peak_bytes, _), point in pairwise(points):
            corners += [(peak_bytes, point[1]), point]
        return corners

    def clipped_points(self) -> list[BaselinePoint]:
        """Return the points above the upper edge of the picture, by peak."""
        clipped = [point for point in self.points if point.overhead > self.high_overhead]
        return sorted(clipped, key=lambda point: (point.peak_bytes, point.overhead))


def frontier_data(
    plans: Sequence[PlanData],
    comparison: ComparisonData | Iterable[ComparisonRow] = (),
    capacity_bytes: int | None = None,
    device: str | None = None,
) -> FrontierData:
    """Return the data of the picture of `frontier_svg`, for the same arguments."""
    if capacity_bytes is None and device is not None:
        capacity_bytes = find_device(device).memory_bytes
    by_peak = sorted(plans, key=lambda plan: (plan.peak_bytes, plan.overhead))
    rows = comparison.rows if isinstance(comparison, ComparisonData) else tuple(comparison)
    others = [(row.strategy, row.plan) for row in rows if row.plan is not None]
    distinct = dict.fromkeys((name, plan.peak_bytes, plan.overhead) for name, plan in others)
    points = [BaselinePoint(*facts) for facts in distinct]
    all_plans = [*by_peak, *(plan for _, plan in others)]
    baseline = max((plan.baseline_peak_bytes for plan in all_plans), default=None)
    peaks = [*(plan.peak_bytes for plan in all_plans), *([baseline] if baseline else [])]
    high_bytes = max(peaks, default=1) or 1
    if capacity_bytes is not None and capacity_bytes <= _FAR_FACTOR * high_bytes:
        high_bytes = max(high_bytes, capacity_bytes)
    high_overhead = max((plan.overhead for plan in all_plans), default=0.0)
    plan_overhead = max((plan.overhead for plan in by_peak), default=0.0)
    overheads = [point.overhead for point in points if point.overhead > 0]
    if plan_overhead > 0:
        high_overhead = min(high_overhead, _CLIP_FACTOR * plan_overhead)
    elif overheads:
        high_overhead = min(high_overhead, _CLIP_FACTOR_OF_MEDIAN * median(overheads))
    return FrontierData(
        plans=by_peak,
        points=points,
        baseline_bytes=baseline,
        capacity_bytes=capacity_bytes,
        low_bytes=_axis_start(min(peaks, default=0), high_bytes),
        high_bytes=high_bytes * 1.03,
        high_overhead=max(high_overhead, 0.001) * 1.05,
    )


def comparison_svg(comparison: ComparisonData[P], *, device: str | None = None) -> str:
    """Return the picture of a comparison as SVG text: the plans of `Auto` as the line with lower
    bounds, and those of the other strategies as points."""
    auto = [r.plan for r in comparison.rows if r.plan is not None and r.strategy == Auto.name]
    others = [row for row in comparison.rows if row.strategy != Auto.name]
    return frontier_svg(auto, others, device=device)


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
    data = frontier_data(plans, comparison, capacity_bytes, device)
    bottom, right = _TOP + _HEIGHT, _WIDTH - _RIGHT
    x_axis = Axis(data.low_bytes, data.high_bytes, _LEFT, right - _LEFT)
    y_axis = Axis(0, data.top_overhead, bottom, -_HEIGHT)
    unit = byte_unit(x_axis.high)
    body = svg.heading(TITLE, summary(data))
    body += left_axis(y_axis, PERCENT, "extra time (%)", _LEFT, right)
    ticks = unit.ticks(x_axis.low, x_axis.high)
    body += bottom_axis(x_axis, unit, ticks, bottom, f"peak memory ({unit.name})")
    if data.capacity_bytes is not None:
        body += _capacity(data.capacity_bytes, x_axis)
    legend: list[_LegendEntry] = []
    if data.plans:
        body.append(_steps(data.plan_steps(), x_axis, y_axis, "line", PLANS))
        legend.append((lambda x, y: _line_sample(x, y, "line", _dot(x, y, 3.5, "run")), PLANS))
    if data.bound_points():
        body.append(_steps(data.bound_steps(), x_axis, y_axis, "bound", BOUND))
        body += [_dot(x_axis.at(x), y_axis.at(y), 2, "bound-dot") for x, y in data.bound_points()]
        legend.append((lambda x, y: _line_sample(x, y, "bound", _dot(x, y, 2, "bound-dot")), BOUND))
    if data.baseline_bytes is not None:
        x = x_axis.at(data.baseline_bytes)
        tip = f"{BASELINE_LABEL}: peak {format_bytes(data.baseline_bytes)}"
        body.append(_dot(x, y_axis.at(0), 4.5, "baseline-dot", tip))
        legend.append((lambda x, y: _dot(x, y, 4.5, "baseline-dot"), BASELINE_LABEL))
    body += _points(data, x_axis, y_axis)
    body += _plans(data.plans, x_axis, y_axis)
    for index, name in enumerate(data.strategies):
        legend.append((lambda x, y, index=index: strategy_mark(index, x, y), name))
    entries, below = _legend(legend, bottom + 62)
    return svg.document(_WIDTH, below, TITLE, summary(data), [*body, *entries])


def summary(data: FrontierData) -> str:
    """Return the number of plans, and the first and the last of them, as text."""
    if not data.plans:
        return f"{len(data.strategies)} strategies" if data.strategies else "no plans"
    first, last = data.plans[0], data.plans[-1]
    if len(data.plans) == 1:
        return f"1 plan, {first.overhead:+.2%} at {format_bytes(first.peak_bytes)}"
    return (
        f"{len(data.plans)} plans, from {first.overhead:+.2%} at {format_bytes(first.peak_bytes)} "
        f"to {last.overhead:+.2%} at {format_bytes(last.peak_bytes)}"
    )


def clipped_label(points: Sequence[BaselinePoint]) -> str:
    """Return the label of the points above the upper edge: each strategy with its smallest
    overhead."""
    smallest: dict[str, float] = {}
    for point in points:
        smallest[point.strategy] = min(point.overhead, smallest.get(point.strategy, point.overhead))
    order = sorted(smallest.items(), key=lambda item: item[1])
    return "above: " + ", ".join(f"{name} {overhead:+,.0%}" for name, overhead in order)


def _axis_start(smallest_peak: float, largest_peak: float) -> float:
    """Return where the memory axis starts: at zero, or at a round number below the smallest peak
    if that peak is at least a fifth of the largest."""
    if smallest_peak < 0.2 * largest_peak:
        return 0.0
    ticks = byte_unit(largest_peak).ticks(0, 0.94 * smallest_peak, 6)
    return ticks[-1] if ticks else 0.0


def _plans(plans: list[PlanData], x_axis: Axis, y_axis: Axis) -> list[str]:
    """Return a dot with a tooltip for each plan."""
    parts: list[str] = []
    for plan in plans:
        bound = f", at least {plan.lower_bound:+.2%}" if plan.lower_bound is not None else ""
        tip = (
            f"peak {format_bytes(plan.peak_bytes)} for the budget "
            f"{format_bytes(plan.budget_bytes)}: {plan.overhead:+.2%}{bound}"
        )
        parts.append(_dot(x_axis.at(plan.peak_bytes), y_axis.at(plan.overhead), 3.5, "run", tip))
    return parts


def _steps(corners: list[PeakAndOverhead], x_axis: Axis, y_axis: Axis, role: str, tip: str) -> str:
    """Return a staircase as a path; that of the bound is dashed."""
    points = (f"{svg.number(x_axis.at(x))} {svg.number(y_axis.at(y))}" for x, y in corners)
    dash = "5 4" if role == "bound" else None
    return svg.path("M" + "L".join(points), role, tip, stroke_dasharray=dash)


def _dot(x: float, y: float, r: float, role: str, tip: str | None = None) -> str:
    """Return a filled circle."""
    children = () if tip is None else (svg.tooltip(tip),)
    return svg.element("circle", *children, cx=x, cy=y, r=r, class_=f"remat-{role}")


def _line_sample(x: float, y: float, role: str, dot: str) -> str:
    """Return a short line with a dot in its middle, for the legend."""
    dash = "5 4" if role == "bound" else None
    data = f"M{svg.number(x - 10)} {svg.number(y)}h20"
    return svg.path(data, role, stroke_dasharray=dash) + dot


def _capacity(capacity_bytes: int, x_axis: Axis) -> list[str]:
    """Return the line at the device's memory and its label; if it is beyond the right edge, only
    the label."""
    label = f"device {format_bytes(capacity_bytes)}"
    right = _WIDTH - _RIGHT
    if capacity_bytes > x_axis.high:
        far_label = f"{label}, far beyond"
        return [svg.text(right, svg.SUMMARY_Y, far_label, role="budget-label", anchor="end")]
    x = x_axis.at(capacity_bytes)
    anchor, shift = ("end", -6) if x > _LEFT + 120 else (None, 6)
    return [
        svg.line(x, _TOP - 18, x, _TOP + _HEIGHT, "budget", dash="7 4"),
        svg.text(x + shift, _TOP - 10, label, role="budget-label", anchor=anchor),
    ]


def _points(data: FrontierData, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Return a marker for each point of a strategy. Of several at the same place, those after the
    first are rings around it; points above the upper edge are triangles."""
    parts: list[str] = []
    marker_centres: list[tuple[float, float]] = []
    strategies = data.strategies
    for point in data.points:
        if point.overhead > data.high_overhead:
            continue
        x, y = x_axis.at(point.peak_bytes), y_axis.at(point.overhead)
        tip = f"{point.strategy}: {point.overhead:+.2%} at {format_bytes(point.peak_bytes)}"
        around = sum(abs(x - a) < 2 and abs(y - b) < 2 for a, b in marker_centres)
        marker_centres.append((x, y))
        index = strategies.index(point.strategy)
        if around:
            parts.append(strategy_ring(index, x, y, around, tip))
        else:
            parts.append(strategy_mark(index, x, y, tip))
    clipped_points = data.clipped_points()
    for point in clipped_points:
        tip = f"{point.strategy}: {point.overhead:+,.0%} at {format_bytes(point.peak_bytes)}"
        index = strategies.index(point.strategy)
        parts.append(strategy_triangle(index, x_axis.at(point.peak_bytes), _TOP + 6, tip))
    if clipped_points:
        last = max(point.peak_bytes for point in clipped_points)
        parts.append(svg.text(x_axis.at(last) + 12, _TOP + 10, clipped_label(clipped_points)))
    return parts


_LegendEntry = tuple[Callable[[float, float], str], str]
"""A function that draws the sample at (x, y), and the label."""


def _legend(entries: list[_LegendEntry], y: float) -> tuple[list[str], float]:
    """Return a legend in rows, and the y below the last row."""
    parts: list[str] = []
    x = _LEFT
    for draw_sample, label in entries:
        entry_width = 44 + svg.CHARACTER_WIDTH * len(label)
        if x > _LEFT and x + entry_width > _WIDTH - _RIGHT:
            x, y = _LEFT, y + 20
        parts += [draw_sample(x + 10, y - 4), svg.text(x + 26, y, label)]
        x += entry_width
    return parts, y + 18
