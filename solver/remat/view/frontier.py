"""`frontier_svg`: extra time against peak memory, for many budgets, with what is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from remat.budget import format_bytes
from remat.compare import Row
from remat.plan import Plan
from remat.view import svg
from remat.view.axes import (
    Axis,
    bottom_axis,
    byte_ticks,
    decimal_ticks,
    left_axis,
    tick_bytes,
)

_WIDTH, _HEIGHT = 960.0, 400.0
_LEFT, _RIGHT, _TOP = 72.0, 24.0, 56.0
_CLIP = 2.5
"""Baselines that cost more than this many times the dearest plan would squash the frontier."""


def frontier_svg(
    plans: Sequence[Plan], rows: Iterable[Row] = (), capacity_bytes: int | None = None
) -> str:
    """The picture as SVG text.

    `plans` (as from `remat.sweep`) are one line, their lower bounds a second, dashed one. `rows`
    (as from `remat.compare`) are points, one mark a strategy; one that is far above the line is a
    triangle at the upper edge. `capacity_bytes` is what the device has. Lines between points guide
    the eye: it is the points that are known.
    """
    line = sorted(plans, key=lambda plan: (plan.peak_bytes, plan.overhead))
    points = [(row.strategy, row.plan) for row in rows if row.plan is not None]
    everything = [*line, *(plan for _, plan in points)]
    body = [svg.text(_LEFT, 24, "Extra time against peak memory", role="title")]
    body.append(svg.text(_LEFT, 42, _summary(line)))
    across, up = _axes(line, everything, capacity_bytes)
    bottom = _TOP + _HEIGHT
    body += left_axis(up, decimal_ticks(0, up.high, 6), _tick_percent, _LEFT, _WIDTH - _RIGHT)
    ticks = byte_ticks(across.high)
    body += bottom_axis(across, [t for t in ticks if t >= across.low], tick_bytes, bottom, "peak")
    if capacity_bytes is not None:
        body += _capacity(capacity_bytes, across)
    entries: list[tuple[str, str]] = []
    if any(plan.lower_bound is not None for plan in line):
        entries.append(("bound-swatch", "lower bound"))
        body += _bounds(line, across, up)
    if line:
        entries.insert(0, ("run", "plans"))
        body += _plans(line, across, up)
    strategies = list(dict.fromkeys(strategy for strategy, _ in points))
    body += _baselines(points, strategies, across, up)
    marks, y = svg.legend(entries, _LEFT, bottom + 56, _WIDTH - _LEFT)
    more, y = _strategies(strategies, y if entries else bottom + 56)
    return svg.document(
        _WIDTH, y, "Extra time against peak memory", _summary(line), [*body, *marks, *more]
    )


def _axes(
    line: list[Plan], everything: list[Plan], capacity_bytes: int | None
) -> tuple[Axis, Axis]:
    """Memory from zero on; time up to the dearest point that does not squash the line."""
    most = max((plan.peak_bytes for plan in everything), default=0) or 1
    if capacity_bytes is not None and capacity_bytes <= 2 * most:
        most = max(most, capacity_bytes)
    dearest = max((plan.overhead for plan in everything), default=0.0)
    own = max((plan.overhead for plan in line), default=0.0)
    if own > 0:
        dearest = min(dearest, _CLIP * own)
    across = Axis(0, most * 1.04, _LEFT, _WIDTH - _LEFT - _RIGHT)
    return across, Axis(0, max(dearest, 0.001) * 1.08, _TOP + _HEIGHT, -_HEIGHT)


def _plans(line: list[Plan], across: Axis, up: Axis) -> list[str]:
    places = [(across.at(plan.peak_bytes), up.at(plan.overhead)) for plan in line]
    parts = [svg.path(_polyline(places), "line")]
    for plan, (x, y) in zip(line, places, strict=True):
        bound = f", at least {plan.lower_bound:+.2%}" if plan.lower_bound is not None else ""
        tip = svg.tooltip(
            f"peak {format_bytes(plan.peak_bytes)} for the budget "
            f"{format_bytes(plan.budget_bytes)}: {plan.overhead:+.2%}{bound}"
        )
        parts.append(svg.element("circle", tip, cx=x, cy=y, r=3.5, class_="remat-run"))
    return parts


def _bounds(line: list[Plan], across: Axis, up: Axis) -> list[str]:
    """A bound for a budget holds for every smaller peak too, so each is drawn at its plan's."""
    places = [
        (across.at(plan.peak_bytes), up.at(plan.lower_bound))
        for plan in line
        if plan.lower_bound is not None
    ]
    dots = [svg.element("circle", cx=x, cy=y, r=2, class_="remat-bound-swatch") for x, y in places]
    return [svg.path(_polyline(places), "bound", "lower bound", stroke_dasharray="5 4"), *dots]


def _polyline(places: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{svg.number(x)} {svg.number(y)}" for x, y in places)


def _capacity(capacity_bytes: int, across: Axis) -> list[str]:
    words = f"device {format_bytes(capacity_bytes)}"
    right = _WIDTH - _RIGHT
    if capacity_bytes > across.high:
        return [svg.text(right, 42, f"{words}, far beyond", role="budget-label", anchor="end")]
    x = across.at(capacity_bytes)
    anchor, shift = ("end", -6) if x > _LEFT + 120 else (None, 6)
    return [
        svg.line(x, _TOP - 6, x, _TOP + _HEIGHT, "budget", dash="7 4"),
        svg.text(x + shift, _TOP + 4, words, role="budget-label", anchor=anchor),
    ]


def _baselines(
    points: list[tuple[str, Plan]], strategies: list[str], across: Axis, up: Axis
) -> list[str]:
    """A mark a plan; a mark that would hide another one stands to its right."""
    parts: list[str] = []
    taken: list[tuple[float, float]] = []
    places = dict.fromkeys((name, plan.peak_bytes, plan.overhead) for name, plan in points)
    for name, peak_bytes, overhead in places:
        x, tip = across.at(peak_bytes), f"{name}: {overhead:+.2%} at {format_bytes(peak_bytes)}"
        index = strategies.index(name)
        shape, y = _SHAPES[index % len(_SHAPES)], up.at(overhead)
        if overhead > up.high:
            shape, y, tip = _up, _TOP + 6, f"{tip}, above the edge"
        while any(abs(x - other) < 7 and abs(y - level) < 7 for other, level in taken):
            x += 10
        taken.append((x, y))
        parts.append(_mark(shape, index, x, y, tip))
        if shape is _up:
            parts.append(svg.text(x + 8, y + 4, f"{overhead:+.0%}"))
    return parts


def _strategies(names: list[str], y: float) -> tuple[list[str], float]:
    """The legend of the baselines' marks, and the y below it."""
    parts: list[str] = []
    x = _LEFT
    for index, name in enumerate(names):
        needed = 32 + svg.CHARACTER_WIDTH * len(name)
        if x > _LEFT and x + needed > _WIDTH - _RIGHT:
            x, y = _LEFT, y + 18
        shape = _SHAPES[index % len(_SHAPES)]
        parts += [_mark(shape, index, x + 5, y - 4, name), svg.text(x + 16, y, name)]
        x += needed
    return parts, y + (18 if names else 0)


def _mark(shape: Callable[[float, float], str], index: int, x: float, y: float, tip: str) -> str:
    return svg.path(shape(x, y), "point", tip, fill=svg.SERIES[index % len(svg.SERIES)])


def _square(x: float, y: float) -> str:
    return f"M{svg.number(x - 4)} {svg.number(y - 4)}h8v8h-8z"


def _diamond(x: float, y: float) -> str:
    return f"M{svg.number(x)} {svg.number(y - 5.5)}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"


def _cross(x: float, y: float) -> str:
    start = f"M{svg.number(x - 1.6)} {svg.number(y - 5)}"
    return f"{start}h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z"


def _up(x: float, y: float) -> str:
    return f"M{svg.number(x)} {svg.number(y - 5)}l5 9h-10z"


_SHAPES = (_square, _diamond, _cross)


def _tick_percent(value: float) -> str:
    return f"{value * 100:.3g}%" if value < 9.995 else f"{value * 100:,.0f}%"


def _summary(line: list[Plan]) -> str:
    if not line:
        return "no plans"
    first, last = line[0], line[-1]
    return (
        f"{len(line)} plans, from {first.overhead:+.2%} at {format_bytes(first.peak_bytes)} to "
        f"{last.overhead:+.2%} at {format_bytes(last.peak_bytes)}"
    )
