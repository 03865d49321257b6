"""`frontier_svg`: extra time against peak memory, for many budgets, with what is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from remat.costs.devices import find_device
from remat.limits.units import format_bytes
from remat.plan_data import P, PlanData
from remat.report.comparison import Compared, Row
from remat.strategies.auto import Auto
from remat.view.drawing import svg
from remat.view.drawing.axes import PERCENT, Axis, bottom_axis, byte_unit, left_axis
from remat.view.drawing.marks import mark, ring, triangle
from remat.view.timeline import EAGER

TITLE = "Extra time against peak memory"
PLANS, BOUND = "plans", "lower bound"
_WIDTH, _HEIGHT = 960.0, 420.0
_LEFT, _RIGHT, _TOP = 60.0, 24.0, 88.0
_CLIP, _CLIP_MEDIAN = 1.5, 2.5
"""Baselines that cost more than this many times the dearest plan, or where there is no plan that
costs anything, the median of the baselines, would squash the picture."""

_FAR = 1.5
"""A device with more than this many times the largest peak is beyond the right edge."""

Place = tuple[float, float]
"""Peak in bytes, extra time as a fraction."""


@dataclass(frozen=True)
class Point:
    """What one strategy does at one budget."""

    strategy: str
    peak_bytes: int
    overhead: float


@dataclass(frozen=True)
class Frontier:
    """What the picture shows: the plans by peak, the baselines, and how far the axes reach."""

    line: list[PlanData]
    points: list[Point]
    eager_bytes: int | None
    capacity_bytes: int | None
    low_bytes: float
    high_bytes: float
    high_overhead: float

    @property
    def top_overhead(self) -> float:
        """Where the picture ends: what is above the edge has room of its own."""
        return self.high_overhead * (1.1 if self.above() else 1.0)

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(point.strategy for point in self.points))

    def plans(self) -> list[Place]:
        """The corners of the least time known for each peak: a plan serves for all larger ones."""
        known = [(float(plan.peak_bytes), plan.overhead) for plan in self.line]
        if self.eager_bytes is not None and known:
            known.append((float(self.eager_bytes), 0.0))
        corners = known[:1]
        for (_, overhead), place in pairwise(known):
            corners += [(place[0], overhead), place]
        return corners

    def bounds(self) -> list[Place]:
        """The proved bounds, at the peaks of their plans."""
        return [
            (float(plan.peak_bytes), plan.lower_bound)
            for plan in self.line
            if plan.lower_bound is not None
        ]

    def bound(self) -> list[Place]:
        """The corners of the proved bound: what is proved for a peak holds for all smaller ones."""
        proved = self.bounds()
        corners = proved[:1]
        for (peak_bytes, _), place in pairwise(proved):
            corners += [(peak_bytes, place[1]), place]
        return corners

    def above(self) -> list[Point]:
        """The baselines that are over the upper edge, by peak."""
        over = [point for point in self.points if point.overhead > self.high_overhead]
        return sorted(over, key=lambda point: (point.peak_bytes, point.overhead))


def frontier(
    plans: Sequence[PlanData],
    comparison: Compared | Iterable[Row] = (),
    capacity_bytes: int | None = None,
    device: str | None = None,
) -> Frontier:
    """The data of the picture; the arguments are those of `frontier_svg`."""
    if capacity_bytes is None and device is not None:
        capacity_bytes = find_device(device).memory_bytes
    line = sorted(plans, key=lambda plan: (plan.peak_bytes, plan.overhead))
    rows = comparison.rows if isinstance(comparison, Compared) else tuple(comparison)
    made = [(row.strategy, row.plan) for row in rows if row.plan is not None]
    places = dict.fromkeys((name, plan.peak_bytes, plan.overhead) for name, plan in made)
    points = [Point(*place) for place in places]
    everything = [*line, *(plan for _, plan in made)]
    eager = max((plan.baseline_peak_bytes for plan in everything), default=None)
    peaks = [*(plan.peak_bytes for plan in everything), *([eager] if eager else [])]
    most = max(peaks, default=1) or 1
    if capacity_bytes is not None and capacity_bytes <= _FAR * most:
        most = max(most, capacity_bytes)
    dearest = max((plan.overhead for plan in everything), default=0.0)
    own = max((plan.overhead for plan in line), default=0.0)
    costs = [point.overhead for point in points if point.overhead > 0]
    if own > 0:
        dearest = min(dearest, _CLIP * own)
    elif costs:
        dearest = min(dearest, _CLIP_MEDIAN * median(costs))
    return Frontier(
        line=line,
        points=points,
        eager_bytes=eager,
        capacity_bytes=capacity_bytes,
        low_bytes=_low(min(peaks, default=0), most),
        high_bytes=most * 1.03,
        high_overhead=max(dearest, 0.001) * 1.05,
    )


def comparison_svg(comparison: Compared[P], *, device: str | None = None) -> str:
    """The plans of `Auto`, which come with bounds, as the line, and those of every other strategy
    as points."""
    own = Auto.name
    line = [row.plan for row in comparison.rows if row.plan is not None and row.strategy == own]
    others = [row for row in comparison.rows if row.strategy != own]
    return frontier_svg(line, others, device=device)


def frontier_svg(
    plans: Sequence[PlanData],
    comparison: Compared | Iterable[Row] = (),
    capacity_bytes: int | None = None,
    *,
    device: str | None = None,
) -> str:
    """The picture as SVG text: `frontier_svg(remat.sweep(t), remat.compare(t), device="h200")`.

    `plans` (as from `remat.sweep`) are one line, their lower bounds a second, dashed one: steps,
    since a plan serves for every larger budget and a bound holds for every smaller one. The
    optimum lies between. A `comparison` (or its rows) adds points, one mark a strategy; those far
    above the line are triangles at the upper edge. `capacity_bytes`, or the name of a `device`,
    adds what the device has.

    Raises `ValueError` for an unknown device.
    """
    shown = frontier(plans, comparison, capacity_bytes, device)
    bottom, right = _TOP + _HEIGHT, _WIDTH - _RIGHT
    across = Axis(shown.low_bytes, shown.high_bytes, _LEFT, right - _LEFT)
    up = Axis(0, shown.top_overhead, bottom, -_HEIGHT)
    unit = byte_unit(across.high)
    body = svg.heading(TITLE, summary(shown))
    body += left_axis(up, PERCENT, "extra time (%)", _LEFT, right)
    ticks = unit.ticks(across.low, across.high)
    body += bottom_axis(across, unit, ticks, bottom, f"peak memory ({unit.name})")
    if shown.capacity_bytes is not None:
        body += _capacity(shown.capacity_bytes, across)
    legend: list[tuple[Callable[[float, float], str], str]] = []
    if shown.line:
        body.append(_steps(shown.plans(), across, up, "line", PLANS))
        legend.append((lambda x, y: _sample(x, y, "line", _dot(x, y, 3.5, "run")), PLANS))
    if shown.bounds():
        body.append(_steps(shown.bound(), across, up, "bound", BOUND))
        body += [_dot(across.at(x), up.at(y), 2, "bound-dot") for x, y in shown.bounds()]
        legend.append((lambda x, y: _sample(x, y, "bound", _dot(x, y, 2, "bound-dot")), BOUND))
    if shown.eager_bytes is not None:
        x = across.at(shown.eager_bytes)
        tip = f"{EAGER}: peak {format_bytes(shown.eager_bytes)}"
        body.append(_dot(x, up.at(0), 4.5, "eager-dot", tip))
        legend.append((lambda x, y: _dot(x, y, 4.5, "eager-dot"), EAGER))
    body += _points(shown, across, up)
    body += _plans(shown.line, across, up)
    for index, name in enumerate(shown.strategies):
        legend.append((lambda x, y, index=index: mark(index, x, y), name))
    entries, below = _legend(legend, bottom + 62)
    return svg.document(_WIDTH, below, TITLE, summary(shown), [*body, *entries])


def summary(shown: Frontier) -> str:
    """How many plans, and the first and the last of them."""
    if not shown.line:
        return f"{len(shown.strategies)} strategies" if shown.strategies else "no plans"
    first, last = shown.line[0], shown.line[-1]
    if len(shown.line) == 1:
        return f"1 plan, {first.overhead:+.2%} at {format_bytes(first.peak_bytes)}"
    return (
        f"{len(shown.line)} plans, from {first.overhead:+.2%} at {format_bytes(first.peak_bytes)} "
        f"to {last.overhead:+.2%} at {format_bytes(last.peak_bytes)}"
    )


def above_words(points: Sequence[Point]) -> str:
    """What is over the upper edge, in words: each strategy once, with the least that it costs."""
    least: dict[str, float] = {}
    for point in points:
        least[point.strategy] = min(point.overhead, least.get(point.strategy, point.overhead))
    order = sorted(least.items(), key=lambda item: item[1])
    return "above: " + ", ".join(f"{name} {overhead:+,.0%}" for name, overhead in order)


def _low(least: float, most: float) -> float:
    """Where the memory axis begins: zero, or a round number where that would waste its half."""
    if least < 0.2 * most:
        return 0.0
    ticks = byte_unit(most).ticks(0, 0.94 * least, 6)
    return ticks[-1] if ticks else 0.0


def _plans(line: list[PlanData], across: Axis, up: Axis) -> list[str]:
    parts: list[str] = []
    for plan in line:
        bound = f", at least {plan.lower_bound:+.2%}" if plan.lower_bound is not None else ""
        tip = (
            f"peak {format_bytes(plan.peak_bytes)} for the budget "
            f"{format_bytes(plan.budget_bytes)}: {plan.overhead:+.2%}{bound}"
        )
        parts.append(_dot(across.at(plan.peak_bytes), up.at(plan.overhead), 3.5, "run", tip))
    return parts


def _steps(corners: list[Place], across: Axis, up: Axis, role: str, tip: str) -> str:
    places = (f"{svg.number(across.at(x))} {svg.number(up.at(y))}" for x, y in corners)
    dash = "5 4" if role == "bound" else None
    return svg.path("M" + "L".join(places), role, tip, stroke_dasharray=dash)


def _dot(x: float, y: float, r: float, role: str, tip: str | None = None) -> str:
    children = () if tip is None else (svg.tooltip(tip),)
    return svg.element("circle", *children, cx=x, cy=y, r=r, class_=f"remat-{role}")


def _sample(x: float, y: float, role: str, dot: str) -> str:
    dash = "5 4" if role == "bound" else None
    data = f"M{svg.number(x - 10)} {svg.number(y)}h20"
    return svg.path(data, role, stroke_dasharray=dash) + dot


def _capacity(capacity_bytes: int, across: Axis) -> list[str]:
    words = f"device {format_bytes(capacity_bytes)}"
    right = _WIDTH - _RIGHT
    if capacity_bytes > across.high:
        label = f"{words}, far beyond"
        return [svg.text(right, svg.SUMMARY_Y, label, role="budget-label", anchor="end")]
    x = across.at(capacity_bytes)
    anchor, shift = ("end", -6) if x > _LEFT + 120 else (None, 6)
    return [
        svg.line(x, _TOP - 18, x, _TOP + _HEIGHT, "budget", dash="7 4"),
        svg.text(x + shift, _TOP - 10, words, role="budget-label", anchor=anchor),
    ]


def _points(shown: Frontier, across: Axis, up: Axis) -> list[str]:
    """A mark a plan. Where several lie at one place, those after the first are rings around it."""
    parts: list[str] = []
    taken: list[tuple[float, float]] = []
    strategies = shown.strategies
    for point in shown.points:
        if point.overhead > shown.high_overhead:
            continue
        x, y = across.at(point.peak_bytes), up.at(point.overhead)
        tip = f"{point.strategy}: {point.overhead:+.2%} at {format_bytes(point.peak_bytes)}"
        around = sum(abs(x - a) < 2 and abs(y - b) < 2 for a, b in taken)
        taken.append((x, y))
        index = strategies.index(point.strategy)
        parts.append(ring(index, x, y, around, tip) if around else mark(index, x, y, tip))
    above = shown.above()
    for point in above:
        tip = f"{point.strategy}: {point.overhead:+,.0%} at {format_bytes(point.peak_bytes)}"
        index = strategies.index(point.strategy)
        parts.append(triangle(index, across.at(point.peak_bytes), _TOP + 6, tip))
    if above:
        last = max(point.peak_bytes for point in above)
        parts.append(svg.text(across.at(last) + 12, _TOP + 10, above_words(above)))
    return parts


def _legend(
    entries: list[tuple[Callable[[float, float], str], str]], y: float
) -> tuple[list[str], float]:
    """Marks with words, and the y below the last row."""
    parts: list[str] = []
    x = _LEFT
    for draw, words in entries:
        needed = 44 + svg.CHARACTER_WIDTH * len(words)
        if x > _LEFT and x + needed > _WIDTH - _RIGHT:
            x, y = _LEFT, y + 20
        parts += [draw(x + 10, y - 4), svg.text(x + 26, y, words)]
        x += needed
    return parts, y + 18
