"""Marks for many strategies in one picture, told apart by shape as well as by colour."""

from __future__ import annotations

from collections.abc import Sequence

from remat.view.drawing import svg

RADIUS = 5.0

_BAR = 0.36

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
"""Each shape's marker in matplotlib, and its corners for a radius of one."""

_UP = ((0.0, -1.0), (1.0, 0.8), (-1.0, 0.8))


def series(index: int) -> str:
    """The colour of the strategy of that number."""
    return svg.SERIES[index % len(svg.SERIES)]


def marker(index: int) -> str:
    """Its marker in matplotlib."""
    return SHAPES[index % len(SHAPES)][0]


def mark(index: int, x: float, y: float, tip: str | None = None) -> str:
    """The mark of the strategy of that number."""
    return svg.path(_outline(_corners(index), x, y, RADIUS), "point", tip, fill=series(index))


def ring(index: int, x: float, y: float, around: int, tip: str) -> str:
    """Its outline around `around` other marks at the same place."""
    data = _outline(_corners(index), x, y, RADIUS + 3.0 * min(around, 3))
    return svg.path(data, "ring", tip, stroke=series(index))


def triangle(index: int, x: float, y: float, tip: str) -> str:
    """An arrow head in its colour, for what is above the edge."""
    return svg.path(_outline(_UP, x, y, RADIUS), "point", tip, fill=series(index))


def _corners(index: int) -> tuple[tuple[float, float], ...]:
    return SHAPES[index % len(SHAPES)][1]


def _outline(corners: Sequence[tuple[float, float]], x: float, y: float, r: float) -> str:
    places = (f"{svg.number(x + r * dx)} {svg.number(y + r * dy)}" for dx, dy in corners)
    return "M" + "L".join(places) + "z"
