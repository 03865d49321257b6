"""Axes: where a number is on the picture, and the round numbers to write beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from remat.budget import format_bytes, format_seconds
from remat.view import svg

_ZEROS = re.compile(r"(\.\d*?)0+(?= )")


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


def byte_ticks(high: float) -> list[float]:
    """From 0 to at most `high` bytes in steps of a power of two, between four and eight of them."""
    if high <= 0:
        return [0.0]
    step = 2.0 ** max(0, math.ceil(math.log2(high / 7)))
    return [i * step for i in range(int(high / step) + 1)]


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


def tick_bytes(value: float) -> str:
    """As `format_bytes`, without decimals that are zero: "2 GiB"."""
    return _ZEROS.sub(r"\1", format_bytes(value)).replace(". ", " ")


def tick_seconds(value: float) -> str:
    """As `format_seconds`; zero is "0"."""
    return format_seconds(value) if value else "0"


def tick_count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def left_axis(
    axis: Axis, ticks: list[float], label: Callable[[float], str], left: float, right: float
) -> list[str]:
    """Horizontal grid lines from `left` to `right`, with labels to their left."""
    parts: list[str] = []
    for tick in ticks:
        y = axis.at(tick)
        parts.append(svg.line(left, y, right, y, "grid"))
        parts.append(svg.text(left - 6, y + 4, label(tick), anchor="end"))
    return parts


def bottom_axis(
    axis: Axis, ticks: list[float], label: Callable[[float], str], bottom: float, name: str
) -> list[str]:
    """The line at `bottom` with marks and labels under it, and what it shows under those."""
    right = axis.start + axis.length
    parts = [svg.line(axis.start, bottom, right, bottom, "axis")]
    for tick in ticks:
        x = axis.at(tick)
        parts.append(svg.line(x, bottom, x, bottom + 4, "axis"))
        parts.append(svg.text(x, bottom + 16, label(tick), anchor="middle"))
    parts.append(svg.text((axis.start + right) / 2, bottom + 32, name, anchor="middle"))
    return parts
