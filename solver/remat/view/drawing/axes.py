"""Axes: where a number is on the picture, and the round numbers to write beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat.view.drawing import svg


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps [low, high] to the pixels from `start` on; a negative `length` goes up."""

    low: float
    high: float
    start: float
    length: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        span = self.high - self.low
        return self.start + (self.length * (value - self.low) / span if span > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Unit:
    """What the numbers along one axis count: all of them in the same unit, named once."""

    name: str
    size: float = 1.0

    def label(self, value: float) -> str:
        """The number to write at a value."""
        scaled = value / self.size
        return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{round(scaled, 9):.6g}"

    def ticks(self, low: float, high: float, count: int = 8) -> list[float]:
        """Values in [low, high] with round labels, at most `count + 1` of them."""
        return [
            tick * self.size for tick in decimal_ticks(low / self.size, high / self.size, count)
        ]


RUNS = Unit("runs")
PERCENT = Unit("%", 0.01)


def byte_unit(high: float) -> Unit:
    """The largest binary unit of which there is at least one up to `high` bytes."""
    power = min(int(math.log2(high)) // 10, 4) if high >= 1 else 0
    return Unit(("B", "KiB", "MiB", "GiB", "TiB")[power], 2.0 ** (10 * power))


def second_unit(high: float) -> Unit:
    """The largest of s, ms, µs and ns of which there is at least one up to `high` seconds."""
    for name, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if high >= size:
            return Unit(name, size)
    return Unit("ns", 1e-9)


def decimal_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], at most `count + 1` of them."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def left_axis(axis: Axis, unit: Unit, name: str, left: float, right: float) -> list[str]:
    """Horizontal grid lines from `left` to `right` with numbers to their left, and above them what
    they count."""
    parts = [svg.text(svg.MARGIN, axis.start + axis.length - 12, name)]
    for tick in unit.ticks(axis.low, axis.high):
        y = axis.at(tick)
        parts.append(svg.line(left, y, right, y, "grid"))
        parts.append(svg.text(left - 6, y + 4, unit.label(tick), anchor="end"))
    return parts


def bottom_axis(axis: Axis, unit: Unit, ticks: Sequence[float], y: float, name: str) -> list[str]:
    """The line at `y` with marks and numbers under it, and what they count under those."""
    right = axis.start + axis.length
    parts = [svg.line(axis.start, y, right, y, "axis")]
    for tick in ticks:
        x = axis.at(tick)
        parts.append(svg.line(x, y, x, y + 4, "axis"))
        parts.append(svg.text(x, y + 18, unit.label(tick), anchor="middle"))
    parts.append(svg.text((axis.start + right) / 2, y + 36, name, anchor="middle"))
    return parts


def passes(x: float, left: float, right: float, top: float, bottom: float) -> list[str]:
    """The dotted line where the backward pass begins, and what is on either side of it."""
    parts = [svg.line(x, top - 18, x, bottom, "mark", dash="2 4")]
    if x - left > 150:
        parts.append(svg.text(x - 6, top - 10, "forward", anchor="end"))
    if right - x > 60:
        parts.append(svg.text(x + 6, top - 10, "backward"))
    return parts
