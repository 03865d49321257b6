"""Axes of the pictures: which pixel a number is at, units, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat.view.drawing import svg


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from [low, high] to pixels. It begins at the pixel `start` and is `length`
    pixels long; a negative `length` goes up."""

    low: float
    high: float
    start: float
    length: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.high - self.low
        return self.start + (self.length * (value - self.low) / span if span > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of all numbers along one axis. `size` is the unit in bytes, seconds or runs."""

    name: str
    size: float = 1.0

    def label(self, value: float) -> str:
        """Return the label of a tick at a value: the number in this unit, without its name."""
        scaled = value / self.size
        return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{round(scaled, 9):.6g}"

    def ticks(self, low: float, high: float, count: int = 8) -> list[float]:
        """Return values in [low, high] with round labels, at most `count + 1` of them."""
        return [
            tick * self.size for tick in decimal_ticks(low / self.size, high / self.size, count)
        ]


RUNS = Unit("runs")
PERCENT = Unit("%", 0.01)


def byte_unit(high: float) -> Unit:
    """Return the largest of B, KiB, MiB, GiB and TiB that is not larger than `high` bytes."""
    power = min(int(math.log2(high)) // 10, 4) if high >= 1 else 0
    return Unit(("B", "KiB", "MiB", "GiB", "TiB")[power], 2.0 ** (10 * power))


def second_unit(high: float) -> Unit:
    """Return the largest of s, ms, µs and ns that is not larger than `high` seconds."""
    for name, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if high >= size:
            return Unit(name, size)
    return Unit("ns", 1e-9)


def decimal_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Return the multiples in [low, high] of 1, 2 or 5 times a power of ten, at most `count + 1` of
    them."""
    span = high - low
    if span <= 0:
        return [low]
    min_step = span / count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= min_step * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def left_axis(axis: Axis, unit: Unit, name: str, left: float, right: float) -> list[str]:
    """Return a vertical axis: horizontal grid lines from `left` to `right` with numbers to their
    left, and the axis's name above."""
    parts = [svg.text(svg.MARGIN, axis.start + axis.length - 12, name)]
    for tick in unit.ticks(axis.low, axis.high):
        y = axis.at(tick)
        parts.append(svg.line(left, y, right, y, "grid"))
        parts.append(svg.text(left - 6, y + 4, unit.label(tick), anchor="end"))
    return parts


def bottom_axis(axis: Axis, unit: Unit, ticks: Sequence[float], y: float, name: str) -> list[str]:
    """Return a horizontal axis: a line at `y` with ticks and numbers below it, and the axis's name
    below those."""
    right = axis.start + axis.length
    parts = [svg.line(axis.start, y, right, y, "axis")]
    for tick in ticks:
        x = axis.at(tick)
        parts.append(svg.line(x, y, x, y + 4, "axis"))
        parts.append(svg.text(x, y + 18, unit.label(tick), anchor="middle"))
    parts.append(svg.text((axis.start + right) / 2, y + 36, name, anchor="middle"))
    return parts


def pass_boundary(x: float, left: float, right: float, top: float, bottom: float) -> list[str]:
    """Return the dotted line at `x`, where the backward pass starts, with the labels "forward" and
    "backward" where there is room."""
    parts = [svg.line(x, top - 18, x, bottom, "mark", dash="2 4")]
    if x - left > 150:
        parts.append(svg.text(x - 6, top - 10, "forward", anchor="end"))
    if right - x > 60:
        parts.append(svg.text(x + 6, top - 10, "backward"))
    return parts
