"""Markers for several strategies in one picture, which differ in shape as well as in colour."""

from __future__ import annotations

from collections.abc import Sequence

from remat.view.drawing import svg

RADIUS = 5.0
"""Radius of a marker in pixels."""

_BAR = 0.36
"""Half the width of a bar of the plus-shaped marker, for a radius of one."""

SHAPES: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = (
    ("s", ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))),
    ("D", ((0, -1.1), (1.1, 0), (0, 1.1), (-1.1, 0))),
    (
        "P",
        (
            *((-_BAR, -1.1), (_BAR, -1.1), (_BAR, -_BAR), (1.1, -_BAR), (1.1, _BAR), (_BAR, _BAR)),
            *((_BAR, 1.1), (-_BAR, 1.1), (-_BAR, _BAR), (-1.1, _BAR), (-1.1, -_BAR)),
            (-_BAR, -_BAR),
        ),
    ),
    ("v", ((-1.1, -0.8), (1.1, -0.8), (0, 1.1))),
    (
        "X",
        (
            *((-1, -0.5), (-0.5, -1), (0, -0.5), (0.5, -1), (1, -0.5), (0.5, 0)),
            *((1, 0.5), (0.5, 1), (0, 0.5), (-0.5, 1), (-1, 0.5), (-0.5, 0)),
        ),
    ),
    ("H", ((-0.55, -1), (0.55, -1), (1.1, 0), (0.55, 1), (-0.55, 1), (-1.1, 0))),
    ("<", ((-1.1, 0), (0.8, -1.1), (0.8, 1.1))),
    (">", ((1.1, 0), (-0.8, -1.1), (-0.8, 1.1))),
)
"""The shape of each marker: its code in matplotlib, and its corners for a radius of one."""

_TRIANGLE = ((0.0, -1.0), (1.0, 0.8), (-1.0, 0.8))


def strategy_colour(index: int) -> str:
    """Return the colour of the strategy with this index."""
    return svg.SERIES[index % len(svg.SERIES)]


def matplotlib_marker(index: int) -> str:
    """Return matplotlib's code of the marker of the strategy with this index."""
    return SHAPES[index % len(SHAPES)][0]


def strategy_mark(index: int, x: float, y: float, tip: str | None = None) -> str:
    """Return the marker of the strategy with this index, as SVG at (x, y), with the tooltip
    `tip`."""
    return svg.path(
        _outline(_corners(index), x, y, RADIUS), "point", tip, fill=strategy_colour(index)
    )


def strategy_ring(index: int, x: float, y: float, around: int, tip: str) -> str:
    """Return the outline of a strategy's marker, drawn around `around` other markers at (x, y)."""
    data = _outline(_corners(index), x, y, RADIUS + 3.0 * min(around, 3))
    return svg.path(data, "ring", tip, stroke=strategy_colour(index))


def strategy_triangle(index: int, x: float, y: float, tip: str) -> str:
    """Return a triangle in a strategy's colour that points up, for a point above the picture's
    upper edge."""
    return svg.path(_outline(_TRIANGLE, x, y, RADIUS), "point", tip, fill=strategy_colour(index))


def _corners(index: int) -> tuple[tuple[float, float], ...]:
    return SHAPES[index % len(SHAPES)][1]


def _outline(corners: Sequence[tuple[float, float]], x: float, y: float, radius: float) -> str:
    """Return the path data of a polygon around (x, y)."""
    points = (f"{svg.number(x + radius * dx)} {svg.number(y + radius * dy)}" for dx, dy in corners)
    return "M" + "L".join(points) + "z"
