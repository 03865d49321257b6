"""Pictures as matplotlib figures, for papers: `figure.savefig("timeline.pdf")`.

They change no global state of matplotlib: no pyplot, no backend, no style. They need the extra
`remat[viz]`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from remat.errors import RematError
from remat.view.picture import (
    CSS,
    Area,
    Box,
    Item,
    LegendEntry,
    Line,
    Mark,
    Note,
    Panel,
    Picture,
    Rule,
    Strokes,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.2
"""Width of a figure in inches: that of a page of text."""

_PIXEL, _FRAME_HEIGHT = 0.0078, 0.9
"""Inches for each pixel of a panel's height, and for title, axis and legend."""

_POINTS = 0.52
"""Typographic points for each pixel of a mark's radius or a stroke."""

_SMALL, _TEXT = 7.0, 8.0
"""Font sizes in points."""

_MAX_CHARACTERS = 95
"""Characters of a legend that five columns have room for."""

_MAX_VECTOR_STROKES = 20_000
"""A schedule with more strokes is an image inside a PDF."""


def role_colour(role: str, which: str = "fill|stroke") -> str:
    """Return the light colour of a role as `#rrggbb`, or "none", for drawing without a style sheet.
    `which` selects its CSS property: "fill", "stroke", or by default the first of both."""
    match = re.search(f"(?:{which}):(#[0-9a-f]{{6}})", CSS[role][0])
    return "none" if match is None else match[1]


def picture_figure(picture: Picture) -> Figure:
    """Return a picture as a figure. Raises `RematError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RematError(
            "figures need matplotlib, which is not installed: pip install 'remat[viz]'; the SVG "
            "pictures need nothing"
        ) from error
    heights = [panel.height for panel in picture.panels]
    size = (_WIDTH, _PIXEL * sum(heights) + _FRAME_HEIGHT)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.suptitle(f"{picture.title}: {picture.summary}", fontsize=_TEXT, parse_math=False)
    figure.get_layout_engine().set(hspace=0)  # type: ignore[union-attr]  # constrained
    grid = figure.add_gridspec(len(heights), 1, height_ratios=[max(h, 1) for h in heights])
    first: Axes | None = None
    for index, panel in enumerate(picture.panels):
        axes = figure.add_subplot(grid[index], sharex=first)
        _draw_panel(axes, picture, panel, is_last=index == len(heights) - 1)
        if first is None:
            first = axes
            if picture.corner_note:
                label = {"fontsize": _SMALL, "color": role_colour("budget-label")}
                axes.set_title(picture.corner_note, loc="right", **label)
    if picture.legend:
        figure.legend(
            handles=list(map(_legend_handle, picture.legend)),
            loc="outside lower center",
            ncols=4 if sum(len(e.label) for e in picture.legend) > _MAX_CHARACTERS else 5,
            fontsize=_SMALL,
            frameon=False,
        )
    return figure


def _draw_panel(axes: Axes, picture: Picture, panel: Panel, *, is_last: bool) -> None:
    """Draw a panel with its grid and axes. Only the last panel has the numbers of the horizontal
    axis."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_visible(is_last or panel.y.unit is not None)
    axes.set_axisbelow(True)
    axes.set_xlim(picture.x.low, picture.x.high)
    axes.set_ylim(panel.y.low, panel.y.high)
    for order, item in enumerate(panel.items):
        _draw_item(axes, item, 2 + order / len(panel.items))
    ticks = panel.y.ticks()
    if ticks:
        axes.grid(axis="y", color=role_colour("grid"), linewidth=0.5)
    middles = [((row.low + row.high) / 2, row.text) for row in panel.rows]
    places, labels = zip(*(ticks or middles), strict=True) if ticks or middles else ((), ())
    axes.set_yticks(places, labels, fontsize=_SMALL, parse_math=False)
    axes.tick_params("y", length=0)
    axes.set_ylabel(panel.y.name, fontsize=_TEXT)
    if is_last:
        places, labels = zip(*picture.x.ticks(), strict=True) if picture.x.ticks() else ((), ())
        axes.set_xticks(places, labels, fontsize=_SMALL)
        axes.set_xlabel(picture.x.name, fontsize=_TEXT)
    axes.tick_params("x", length=2 if is_last else 0, labelbottom=is_last)


def _draw_item(axes: Axes, item: Item, order: float) -> None:
    """Draw an item over all items of a lower `order`."""
    match item:
        case Area():
            if item.columns:
                edges = [*(left for left, *_ in item.columns), item.columns[-1][1]]
                heights = [height for *_, height in item.columns]
                face, edge = role_colour(item.role, "fill"), role_colour(item.role, "stroke")
                line = {"edgecolor": edge, "linewidth": 0.5, "zorder": order}
                axes.stairs(heights, edges, fill=True, facecolor=face, **line)
        case Line():
            xs, ys = zip(*item.points, strict=True)
            axes.plot(xs, ys, zorder=order, in_layout=False, **_line_style(item))
        case Mark():
            axes.plot(item.x, item.y, zorder=order, in_layout=False, **_mark_style(item))
        case Strokes():
            _draw_strokes(axes, item, order)
        case Rule():
            _draw_rule(axes, item, order)
        case Note():
            shift = (item.shift * _POINTS, item.lift * _POINTS)
            side = "left" if item.anchor == "start" else "right"
            _draw_note(axes, item.text, (item.x, item.y), shift, ha=side, va="center")
        case Box():
            if item.role != "hover":
                width, height = item.right - item.left, item.bottom - item.top
                place = ([(item.left, width)], (item.top, height))
                axes.broken_barh(*place, color=role_colour(item.role))
                middle = (item.right, (item.top + item.bottom) / 2)
                _draw_note(axes, item.label, middle, (3, 0), va="center")


def _draw_strokes(axes: Axes, item: Strokes, order: float) -> None:
    """Draw strokes as one collection of lines, at least as wide as their minimum."""
    from matplotlib.collections import LineCollection

    low, high = axes.get_ylim()
    inches = axes.get_figure().get_figheight() - _FRAME_HEIGHT  # type: ignore[union-attr]
    width = 72 * inches / abs(high - low or 1) * item.thickness
    min_width = item.min_width * _POINTS * 0.7
    lines = [[(left, y), (right, y)] for y, left, right in item.strokes]
    axes.add_collection(
        LineCollection(
            lines,
            colors=role_colour(item.role),
            linewidths=max(width, min_width, 0.3),
            capstyle="projecting" if width < min_width else "butt",
            rasterized=len(lines) > _MAX_VECTOR_STROKES,
            zorder=order,
        )
    )


def _draw_rule(axes: Axes, rule: Rule, order: float) -> None:
    """Draw a line across the panel, with its labels."""
    role = "budget-label" if rule.role == "budget" else "label"
    style: dict[str, Any] = {"color": role_colour(rule.role), "zorder": order, "linewidth": 1}
    style["linestyle"] = (0, (5, 3)) if rule.role == "budget" else ":"
    label: dict[str, Any] = {"color": role_colour(role)}
    if rule.axis == "y":
        axes.axhline(rule.at, **style)
        place = axes.get_yaxis_transform()
        _draw_note(axes, rule.label, (1, rule.at), (0, 2), xycoords=place, ha="right", **label)
        return
    axes.axvline(rule.at, **style)
    label["xycoords"] = axes.get_xaxis_transform()
    before, after = rule.label_before, rule.label
    if not before:
        before, after = after, ""
    for content, side, shift in ((before, "right", -3), (after, "left", 3)):
        if content:
            _draw_note(axes, content, (rule.at, 1), (shift, 2), ha=side, **label)


def _line_style(item: Line) -> dict[str, Any]:
    """Return matplotlib's options for a line."""
    style = "--" if item.is_dashed else "-"
    line_colour = item.colour or role_colour(item.role, "stroke")
    return {"color": line_colour, "linestyle": style, "linewidth": 1 if item.is_dashed else 1.3}


def _mark_style(mark: Mark) -> dict[str, Any]:
    """Return matplotlib's options for a marker: an outline for the role "ring", otherwise
    filled."""
    is_ring = mark.role == "ring"
    edge = mark.colour if is_ring else role_colour(mark.role, "stroke")
    return {
        "linestyle": "none",
        "marker": mark.shape,
        "markersize": 2 * mark.radius * _POINTS,
        "markerfacecolor": "none" if is_ring else mark.colour or role_colour(mark.role, "fill"),
        "markeredgecolor": edge,
        "markeredgewidth": 0.4 if mark.role == "point" else 1,
        "clip_on": False,
    }


def _draw_note(
    axes: Axes, text: str, point: tuple[float, float], shift: tuple[float, float], **options: Any
) -> None:
    """Write small text at a point of the axes, moved by `shift` in typographic points."""
    options = {"parse_math": False, "textcoords": "offset points", "fontsize": _SMALL} | options
    axes.annotate(text, point, xytext=shift, **options)


def _legend_handle(entry: LegendEntry) -> Artist:
    """Return the sample that the legend shows for an entry."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if entry.role:
        return Patch(color=role_colour(entry.role), label=entry.label)
    style: dict[str, Any] = {}
    if entry.mark is not None:
        style = _mark_style(entry.mark) | {"clip_on": True}
    if entry.line is not None:
        style |= _line_style(entry.line)
    return Line2D([0], [0], label=entry.label, **style)
