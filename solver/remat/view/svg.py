"""Pictures as SVG, for light and dark colour schemes.

Each element has a class for its role, and the style sheet has two colours per role: a light one,
which print always uses, and one for screens that prefer dark. Class names begin with `remat-`
because the style sheet of an inline SVG applies to the whole page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.view.picture import (
    CSS,
    SHAPES,
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
    Scale,
    Strokes,
)
from remat.view.text import escape_markup

CHARACTER_WIDTH = 6.5
"""Average width in pixels of a character of the labels, because text cannot be measured here."""

_SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
_MARGIN, _RIGHT = 16.0, 24.0
_TOP, _TOP_WITHOUT_NAME = 88.0, 64.0
_TITLE_Y, _SUMMARY_Y = 26.0, 46.0
_MIN_BOX_WIDTH = 0.8


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear map from a scale to pixels. It begins at the pixel `start` and is `length` pixels
    long; a negative `length` goes up."""

    scale: Scale
    start: float
    length: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.scale.high - self.scale.low
        return self.start + (self.length * (value - self.scale.low) / span if span else 0.0)

    @property
    def end(self) -> float:
        """The pixel at which the axis ends."""
        return self.start + self.length


def picture_svg(picture: Picture) -> str:
    """Return a picture as SVG text. Screen readers read its title and summary."""
    labels = [len(row.text) for panel in picture.panels for row in panel.rows]
    left = max(picture.min_left, _MARGIN + CHARACTER_WIDTH * max(labels, default=0) + 10)
    x = _Axis(picture.x, left, picture.width - _RIGHT - left)
    body = [
        svg_text(_MARGIN, _TITLE_Y, picture.title, role="title"),
        svg_text(_MARGIN, _SUMMARY_Y, picture.summary),
    ]
    if picture.corner_note:
        note = svg_text(x.end, _SUMMARY_Y, picture.corner_note, role="budget-label", anchor="end")
        body.append(note)
    bottom = _TOP if any(panel.y.name for panel in picture.panels) else _TOP_WITHOUT_NAME
    axes: list[_Axis] = []
    for panel in picture.panels:
        bottom += panel.height
        axes.append(_Axis(panel.y, bottom, -panel.height))
    panels = list(zip(picture.panels, axes, strict=True))
    for panel, y in panels:
        body += _grid_elements(panel, x, y)
    body += [svg_line(x.start, y.start, x.end, y.start, "axis") for p, y in panels[:-1] if p.y.unit]
    body += _bottom_axis_elements(x, bottom)
    for panel, y in panels:
        body += [part for item in panel.items for part in _item_elements(item, x, y, bottom)]
    legend, below = _legend_elements(picture.legend, x, bottom + (62 if picture.x.name else 24))
    return _svg_document(picture, below, [*body, *legend])


def _grid_elements(panel: Panel, x: _Axis, y: _Axis) -> list[str]:
    """Return the grid of a panel with its numbers, the names of its rows, and its own name, as SVG
    elements."""
    parts: list[str] = []
    if panel.y.name:
        parts.append(svg_text(_MARGIN, y.end - 12, panel.y.name))
    for tick, label in panel.y.ticks():
        height = y.at(tick)
        parts.append(svg_line(x.start, height, x.end, height, "grid"))
        parts.append(svg_text(x.start - 6, height + 4, label, anchor="end"))
    for row in panel.rows:
        top, bottom = y.at(row.low), y.at(row.high)
        if panel.has_row_lines:
            parts.append(svg_line(x.start - 4, top, x.end, top, "grid"))
        parts.append(
            svg_text(x.start - 8, (top + bottom) / 2 + 4, row.text, anchor="end", tip=row.tip)
        )
    return parts


def _item_elements(item: Item, x: _Axis, y: _Axis, bottom: float) -> list[str]:
    """Return an item of a panel as SVG elements. `bottom` is the lower edge of all panels."""
    match item:
        case Area():
            return [svg_path(_staircase_path_data(item, x, y), item.role, item.tip)]
        case Line():
            return [_line_path(item, [(x.at(a), y.at(b)) for a, b in item.points], item.tip)]
        case Mark():
            return [_mark_element(item, x.at(item.x), y.at(item.y))]
        case Note():
            place = x.at(item.x) + item.shift, y.at(item.y) - item.lift
            return [svg_text(*place, item.text, anchor="end" if item.anchor == "end" else None)]
        case Rule():
            return _rule_elements(item, x, y, bottom)
        case Strokes():
            row_height = abs(y.length / (y.scale.high - y.scale.low or 1.0))
            width = max(row_height * item.thickness, item.min_height)
            data = "".join(
                f"M{coordinate_text(round(x.at(left), 1))} {coordinate_text(y.at(at))}"
                f"h{coordinate_text(round(max(x.at(right) - x.at(left), item.min_width), 1))}"
                for at, left, right in item.strokes
            )
            return [svg_path(data, item.role, item.tip, stroke_width=width)]
        case Box():
            left, top, below = x.at(item.left), y.at(item.top), y.at(item.bottom)
            width = max(x.at(item.right) - left, _MIN_BOX_WIDTH)
            box = svg_rectangle(left, top, width, below - top, item.role, item.tip)
            label = svg_text(left + width + 8, (top + below) / 2 + 4, item.label)
            return [box, label] if item.label else [box]


def _rule_elements(rule: Rule, x: _Axis, y: _Axis, bottom: float) -> list[str]:
    """Return a line across the panel, and its labels where there is room for them, as SVG elements.
    A vertical line reaches down to `bottom`."""
    role = "budget-label" if rule.role == "budget" else "label"
    dash = "7 4" if rule.role == "budget" else "2 4"
    if rule.axis == "y":
        at = y.at(rule.at)
        return [
            svg_line(x.start, at, x.end, at, rule.role, dash=dash, stroke_width=1.5),
            svg_text(x.end, at - 6, rule.label, role=role, anchor="end"),
        ]
    at, label_y = x.at(rule.at), y.end - 10
    parts = [svg_line(at, y.end - 18, at, bottom, rule.role, dash=dash)]
    before, after = rule.label_before, rule.label
    if not before and at > x.start + 120:
        before, after = after, ""
    if before and at - x.start > 120:
        parts.append(svg_text(at - 6, label_y, before, role=role, anchor="end"))
    if after and (x.end - at > 60 or not rule.label_before):
        parts.append(svg_text(at + 6, label_y, after, role=role))
    return parts


def _bottom_axis_elements(x: _Axis, y: float) -> list[str]:
    """Return the horizontal axis as SVG elements: a line at `y` with ticks and numbers below it,
    and the axis's name below those."""
    parts = [svg_line(x.start, y, x.end, y, "axis")]
    for tick, label in x.scale.ticks():
        at = x.at(tick)
        parts.append(svg_line(at, y, at, y + 4, "axis"))
        parts.append(svg_text(at, y + 18, label, anchor="middle"))
    if x.scale.name:
        parts.append(svg_text((x.start + x.end) / 2, y + 36, x.scale.name, anchor="middle"))
    return parts


def _staircase_path_data(area: Area, x: _Axis, y: _Axis) -> str:
    """Return the path data of the area below a staircase, without steps that are too low to see; ""
    without columns."""
    if not area.columns:
        return ""
    floor = coordinate_text(y.start)
    data = [f"M{coordinate_text(x.at(area.columns[0][0]))} {floor}"]
    level = floor
    for left, _, height in area.columns:
        top = coordinate_text(round(y.at(height), 1))
        if top != level:
            data.append(f"H{coordinate_text(x.at(left))}V{top}")
            level = top
    data.append(f"H{coordinate_text(x.at(area.columns[-1][1]))}V{floor}Z")
    return "".join(data)


def _line_path(item: Line, points: Sequence[tuple[float, float]], tip: str | None) -> str:
    """Return a line through these pixels as an SVG path, with the item's role, colour and
    dashes."""
    data = "M" + "L".join(f"{coordinate_text(x)} {coordinate_text(y)}" for x, y in points)
    dash = "5 4" if item.is_dashed else None
    return svg_path(data, item.role, tip, stroke=item.colour, stroke_dasharray=dash)


def _mark_element(mark: Mark, x: float, y: float) -> str:
    """Return a marker at a pixel as an SVG element."""
    if mark.shape == "o":
        children = () if mark.tip is None else (svg_tooltip(mark.tip),)
        place = {"cx": x, "cy": y, "r": mark.radius}
        return svg_element(
            "circle", *children, **place, class_=f"remat-{mark.role}", fill=mark.colour
        )
    points = (
        f"{coordinate_text(x + mark.radius * dx)} {coordinate_text(y + mark.radius * dy)}"
        for dx, dy in SHAPES[mark.shape]
    )
    colour = {"stroke" if mark.role == "ring" else "fill": mark.colour}
    return svg_path("M" + "L".join(points) + "z", mark.role, mark.tip, **colour)


def _legend_elements(entries: Sequence[LegendEntry], x: _Axis, y: float) -> tuple[list[str], float]:
    """Return a legend in rows below the panels as SVG elements, and the y below the last row."""
    parts: list[str] = []
    left = x.start
    for entry in entries:
        sample_width = 16 if entry.role else 26
        entry_width = sample_width + CHARACTER_WIDTH * len(entry.label) + 16
        if left > x.start and left + entry_width > x.end + _RIGHT:
            left, y = x.start, y + 18
        if entry.role:
            parts.append(svg_rectangle(left, y - 9, 11, 11, f"{entry.role} remat-swatch"))
        if entry.line is not None:
            parts.append(_line_path(entry.line, [(left, y - 4), (left + 20, y - 4)], None))
        if entry.mark is not None:
            parts.append(_mark_element(entry.mark, left + 10, y - 4))
        parts.append(svg_text(left + sample_width, y, entry.label))
        left += entry_width
    return parts, y + 18


def coordinate_text(value: float) -> str:
    """Return a coordinate as text, with at most two decimals and no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def svg_element(name: str, *children: str, **attributes: str | float | None) -> str:
    """Return an SVG element as text. `children` are text of elements; attribute values are escaped.
    In attribute names, a trailing underscore is dropped (`class_`), and other underscores become
    hyphens. Attributes that are None are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="'
        f'{escape_markup(value) if isinstance(value, str) else coordinate_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children:
        return f"<{name}{written}/>"
    return f"<{name}{written}>{''.join(children)}</{name}>"


def svg_text(
    x: float,
    y: float,
    content: str,
    *,
    role: str = "label",
    anchor: str | None = None,
    size: float | None = None,
    tip: str | None = None,
) -> str:
    """Return a label at (x, y) as an SVG element. `anchor` is "middle" or "end"; `tip` is its
    tooltip."""
    children = (
        [escape_markup(content)] if tip is None else [svg_tooltip(tip), escape_markup(content)]
    )
    return svg_element(
        "text",
        *children,
        x=x,
        y=y,
        class_=f"remat-{role}",
        text_anchor=anchor,
        font_size=size,
    )


def svg_tooltip(content: str) -> str:
    """Return a tooltip as an SVG element, which must be the first child of what it describes."""
    return f"<title>{escape_markup(content)}</title>"


def svg_rectangle(
    x: float, y: float, width: float, height: float, role: str, tip: str | None = None
) -> str:
    """Return a filled rectangle with the tooltip `tip` as an SVG element."""
    children = () if tip is None else (svg_tooltip(tip),)
    return svg_element(
        "rect", *children, x=x, y=y, width=width, height=height, class_=f"remat-{role}"
    )


def svg_line(
    x1: float, y1: float, x2: float, y2: float, role: str, dash: str | None = None, **more: float
) -> str:
    """Return a straight line as an SVG element, one pixel wide by default. `more` are further
    attributes."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return svg_element("line", **ends, class_=f"remat-{role}", stroke_dasharray=dash, **more)


def svg_path(data: str, role: str, tip: str | None = None, **attributes: str | float | None) -> str:
    """Return a path as an SVG element. `data` is its attribute `d`, and `tip` its tooltip."""
    children = () if tip is None else (svg_tooltip(tip),)
    return svg_element("path", *children, d=data, class_=f"remat-{role}", **attributes)


def _svg_document(picture: Picture, height: float, body: Iterable[str]) -> str:
    """Return a complete SVG picture of this height with the elements of `body`; the title is also
    its tooltip."""
    width = picture.width
    return svg_element(
        "svg",
        svg_tooltip(picture.title),
        svg_element("desc", escape_markup(picture.summary)),
        f"<style>{_style_sheet()}</style>",
        svg_element("rect", width=width, height=height, class_="remat-paper"),
        *body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {coordinate_text(width)} {coordinate_text(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=f"{picture.title}. {picture.summary}",
        class_="remat-picture",
    )


def _style_sheet() -> str:
    """Return the style sheet that every picture contains."""
    light = {role: light_css for role, (light_css, _) in CSS.items()}
    dark = {role: dark_css for role, (_, dark_css) in CSS.items() if dark_css}
    return "".join(
        (
            f".remat-picture{{max-width:100%;height:auto;font:12px {_SANS}}}",
            ".remat-title{font-weight:600;font-size:15px}",
            ".remat-grid,.remat-axis{stroke-width:1;fill:none}",
            ".remat-hover{fill:transparent}",
            ".remat-line{stroke-width:2}",
            ".remat-bound,.remat-ring,.remat-baseline-dot{stroke-width:1.5}",
            ".remat-point{stroke-width:0.7}",
            _css_rules(light),
            f"@media screen and (prefers-color-scheme:dark){{{_css_rules(dark)}}}",
            "rect.remat-swatch{stroke:none}",
        )
    )


def _css_rules(colours: dict[str, str]) -> str:
    """Return a style rule for each role."""
    return "".join(f".remat-{role}{{{colour}}}" for role, colour in colours.items())
