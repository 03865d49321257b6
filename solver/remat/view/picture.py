"""`Picture`: what a picture shows, in the units of its axes, before it is drawn.

A picture has panels, one below the other over one horizontal axis. A panel has areas, lines, boxes,
rows of strokes, marks, rules across it, and notes. `remat.view.svg` writes a picture as SVG,
`remat.view.figures` draws it with matplotlib: same text, data and colours.

The hues are those of Okabe and Ito (2008), which colour-blind readers can distinguish. Neighbouring
areas also differ in lightness, for greyscale print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CSS = {
    "paper": ("fill:#ffffff", "fill:#16181c"),
    "label": ("fill:#4a4a4a", "fill:#b4b8bf"),
    "title": ("fill:#1a1a1a", "fill:#f0f0f0"),
    "grid": ("stroke:#dddddd", "stroke:#33373d"),
    "axis": ("stroke:#888888", "stroke:#7d828a"),
    "baseline": ("fill:#e4e4e4;stroke:#b5b5b5", "fill:#2b2e34;stroke:#565b63"),
    "constant": ("fill:#858585", "fill:#5c6067"),
    "results": ("fill:#005f99", "fill:#1f8fd0"),
    "activations": ("fill:#5db8ec", "fill:#8ccbf2"),
    "activation-gradients": ("fill:#b5578f", "fill:#c2639a"),
    "recomputed": ("fill:#f5b83d", "fill:#f0ab1f"),
    "reloaded": ("fill:#009e73", "fill:#35c79b"),
    "on-host": ("fill:#b8b8b8", "fill:#5c6067"),
    "waiting": ("fill:#d55e00", "fill:#ff8c3b"),
    "workspace": ("fill:#004d3a", "fill:#00785a"),
    "budget": ("stroke:#d55e00;fill:#d55e00", "stroke:#ff8c3b;fill:#ff8c3b"),
    "budget-label": ("fill:#b34e00", "fill:#ff8c3b"),
    "mark": ("stroke:#1a1a1a;fill:#1a1a1a", "stroke:#f0f0f0;fill:#f0f0f0"),
    "live": ("stroke:#a3d3f3;fill:#a3d3f3", "stroke:#255a7d;fill:#255a7d"),
    "live-recomputed": ("stroke:#f2b544;fill:#f2b544", "stroke:#936a0e;fill:#936a0e"),
    "live-result": ("stroke:#e2e2e2;fill:#e2e2e2", "stroke:#3a3d44;fill:#3a3d44"),
    "run": ("stroke:#005f99;fill:#005f99", "stroke:#56b4e9;fill:#56b4e9"),
    "recomputation": ("stroke:#d55e00;fill:#d55e00", "stroke:#ff8c3b;fill:#ff8c3b"),
    "line": ("stroke:#005f99;fill:none", "stroke:#56b4e9;fill:none"),
    "bound": ("stroke:#555555;fill:none", "stroke:#b4b8bf;fill:none"),
    "bound-dot": ("fill:#555555", "fill:#b4b8bf"),
    "point": ("stroke:#333333", "stroke:#16181c"),
    "ring": ("fill:none", ""),
    "baseline-dot": ("stroke:#1a1a1a;fill:#ffffff", "stroke:#f0f0f0;fill:#16181c"),
}
"""The CSS of each role: for light screens and print, and for dark screens ("" if identical)."""

SERIES = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#8c8c8c")
"""Fill colours of the strategies, for light and dark backgrounds; they repeat after the last."""

_BAR = 0.36
"""Half the width of a bar of the plus-shaped marker, for a radius of one."""

SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "s": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "D": ((0, -1.1), (1.1, 0), (0, 1.1), (-1.1, 0)),
    "P": (
        *((-_BAR, -1.1), (_BAR, -1.1), (_BAR, -_BAR), (1.1, -_BAR), (1.1, _BAR), (_BAR, _BAR)),
        *((_BAR, 1.1), (-_BAR, 1.1), (-_BAR, _BAR), (-1.1, _BAR), (-1.1, -_BAR)),
        (-_BAR, -_BAR),
    ),
    "v": ((-1.1, -0.8), (1.1, -0.8), (0, 1.1)),
    "X": (
        *((-1, -0.5), (-0.5, -1), (0, -0.5), (0.5, -1), (1, -0.5), (0.5, 0)),
        *((1, 0.5), (0.5, 1), (0, 0.5), (-0.5, 1), (-1, 0.5), (-0.5, 0)),
    ),
    "H": ((-0.55, -1), (0.55, -1), (1.1, 0), (0.55, 1), (-0.55, 1), (-1.1, 0)),
    "<": ((-1.1, 0), (0.8, -1.1), (0.8, 1.1)),
    ">": ((1.1, 0), (-0.8, -1.1), (-0.8, 1.1)),
    "^": ((0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)),
}
"""The corners of each marker for a radius of one, by its code in matplotlib. "o" is a circle."""

_SERIES_SHAPES = tuple(SHAPES)[:-1]


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


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear axis from `low` to `high` with its name. Without a unit it has no numbers."""

    low: float
    high: float
    unit: Unit | None = None
    name: str = ""

    def ticks(self) -> list[tuple[float, str]]:
        """Return the places and labels of the numbers; runs have whole numbers."""
        if self.unit is None:
            return []
        ticks = self.unit.ticks(self.low, self.high)
        return [(t, self.unit.label(t)) for t in ticks if self.unit != RUNS or t == int(t)]


@dataclass(frozen=True, slots=True)
class Area:
    """The area below a staircase: (left, right, height) of its columns from left to right."""

    role: str
    columns: Sequence[tuple[float, float, float]]
    tip: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points, with a colour of its own if `colour` is set."""

    role: str
    points: Sequence[tuple[float, float]]
    tip: str
    is_dashed: bool = False
    colour: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A straight line across a panel at a place of one axis, with a label at its end and, for a
    dotted one, another label on its other side."""

    role: str
    axis: Literal["x", "y"]
    at: float
    label: str
    label_before: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker of a role, with a colour of its own if `colour` is set. `shape` is "o" or a key of
    `SHAPES`; the role "ring" is only an outline. `radius` is in pixels."""

    x: float
    y: float
    radius: float
    tip: str | None = None
    role: str = "point"
    shape: str = "o"
    colour: str | None = None


def strategy_mark(
    index: int, x: float, y: float, tip: str | None = None, radius: float = 5.0
) -> Mark:
    """Return the marker of the strategy with this index. Its shape and colour together differ from
    the other strategies'."""
    shape = _SERIES_SHAPES[index % len(_SERIES_SHAPES)]
    return Mark(x, y, radius, tip, shape=shape, colour=SERIES[index % len(SERIES)])


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle, with a label to its right. The role "hover" is an invisible one that only
    has a tooltip."""

    role: str
    left: float
    right: float
    top: float
    bottom: float
    tip: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Strokes:
    """Horizontal strokes of one role, (y, left, right) each.

    `thickness` is a share of the height of one unit of the vertical axis; strokes are at least as
    wide and high as the minimum in pixels, so that a single one is visible."""

    role: str
    strokes: Sequence[tuple[float, float, float]]
    thickness: float
    min_width: float
    min_height: float
    tip: str


@dataclass(frozen=True, slots=True)
class RowLabel:
    """The name of the rows from `low` to `high` of a panel, at its left side."""

    text: str
    low: float
    high: float
    tip: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Text at a point of a panel, moved by `shift` pixels to the right and `lift` upwards."""

    x: float
    y: float
    text: str
    shift: float = 0.0
    lift: float = 0.0
    anchor: Literal["start", "end"] = "start"


Item = Area | Line | Rule | Mark | Box | Strokes | Note


@dataclass(frozen=True, slots=True)
class Panel:
    """Items over a vertical axis, drawn in order. `height` is in pixels, `rows` name parts of the
    axis; `has_row_lines` draws a line above each named row."""

    y: Scale
    height: float
    items: Sequence[Item]
    rows: Sequence[RowLabel] = ()
    has_row_lines: bool = False


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """An entry of the legend: a coloured square, or a line with a mark, or a mark."""

    label: str
    role: str = ""
    mark: Mark | None = None
    line: Line | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A title with a summary, panels over one horizontal axis, and a legend.

    `corner_note` is small text at the right of the summary. A picture without a horizontal name has
    no numbers below its panels. `min_left` is the width of the margin with numbers and row names.
    """

    title: str
    summary: str
    x: Scale
    panels: Sequence[Panel]
    legend: Sequence[LegendEntry] = ()
    corner_note: str = ""
    min_left: float = 60.0
    width: float = 960.0
