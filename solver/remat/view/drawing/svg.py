"""SVG elements as text, and the palette of the pictures for light and dark colour schemes.

The hues are those of Okabe and Ito (2008), which colour-blind readers can distinguish. Neighbouring
areas also differ in lightness, for greyscale print. Each element has a class for its role, and the
style sheet has two colours per role: a light one, which print always uses, and one for screens that
prefer dark. Class names begin with `remat-` because the style sheet of an inline SVG applies to the
whole page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from remat.view.drawing.text import escape

CHARACTER_WIDTH = 6.5
"""Average width in pixels of a character of the labels, because text cannot be measured here."""

_HEX_COLOUR = re.compile("#[0-9a-f]{6}")

_SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"

_COLOURS = {
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

MARGIN = 16.0
"""Pixels to the left and to the right of a picture's content."""

TITLE_Y, SUMMARY_Y = 26.0, 46.0

SERIES = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#8c8c8c")
"""Fill colours of the strategies, for light and dark backgrounds; they repeat after the last."""


def number(value: float) -> str:
    """Return a coordinate as text, with at most two decimals and no trailing zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """Return an element as text. `children` are text of elements; attribute values are escaped. In
    attribute names, a trailing underscore is dropped (`class_`), and other underscores become
    hyphens. Attributes that are None are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="'
        f'{escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children:
        return f"<{name}{written}/>"
    return f"<{name}{written}>{''.join(children)}</{name}>"


def text(
    x: float,
    y: float,
    content: str,
    *,
    role: str = "label",
    anchor: str | None = None,
    size: float | None = None,
    tip: str | None = None,
) -> str:
    """Return a label at (x, y). `anchor` is "middle" or "end"; `tip` is its tooltip."""
    children = [escape(content)] if tip is None else [tooltip(tip), escape(content)]
    return element(
        "text",
        *children,
        x=x,
        y=y,
        class_=f"remat-{role}",
        text_anchor=anchor,
        font_size=size,
    )


def tooltip(content: str) -> str:
    """Return a tooltip, to be the first child of its element."""
    return f"<title>{escape(content)}</title>"


def rectangle(
    x: float, y: float, width: float, height: float, role: str, tip: str | None = None
) -> str:
    """Return a filled rectangle with the tooltip `tip`."""
    children = () if tip is None else (tooltip(tip),)
    return element("rect", *children, x=x, y=y, width=width, height=height, class_=f"remat-{role}")


def heading(title: str, summary: str) -> list[str]:
    """Return a picture's title, and the summary on the line below it."""
    return [
        text(MARGIN, TITLE_Y, title, role="title"),
        text(MARGIN, SUMMARY_Y, summary),
    ]


def colour(role: str) -> str:
    """Return the light colour of a role as `#rrggbb`, for drawing without a style sheet."""
    return _HEX_COLOUR.findall(_COLOURS[role][0])[0]


def line(
    x1: float, y1: float, x2: float, y2: float, role: str, dash: str | None = None, **more: float
) -> str:
    """Return a straight line, one pixel wide by default."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return element("line", **ends, class_=f"remat-{role}", stroke_dasharray=dash, **more)


def path(data: str, role: str, tip: str | None = None, **attributes: str | float | None) -> str:
    """Return a path. `data` is its attribute `d`, and `tip` its tooltip."""
    children = () if tip is None else (tooltip(tip),)
    return element("path", *children, d=data, class_=f"remat-{role}", **attributes)


def legend(
    entries: Iterable[tuple[str, str]], x: float, y: float, width: float
) -> tuple[list[str], float]:
    """Return a legend, and the y below it. It has a coloured square and a label for each
    (role, label), in rows of `width` that begin at (x, y)."""
    parts: list[str] = []
    left = x
    for role, label in entries:
        entry_width = 16 + CHARACTER_WIDTH * len(label) + 16
        if left > x and left + entry_width > x + width:
            left, y = x, y + 18
        parts.append(rectangle(left, y - 9, 11, 11, f"{role} remat-swatch"))
        parts.append(text(left + 16, y, label))
        left += entry_width
    return parts, y + 18


def document(width: float, height: float, title: str, summary: str, body: Iterable[str]) -> str:
    """Return a complete SVG picture. Screen readers read `title` and `summary`; the title is also
    the picture's tooltip."""
    return element(
        "svg",
        tooltip(title),
        element("desc", escape(summary)),
        f"<style>{style()}</style>",
        element("rect", width=width, height=height, class_="remat-paper"),
        *body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=f"{title}. {summary}",
        class_="remat-picture",
    )


def style() -> str:
    """Return the style sheet that every picture contains."""
    light = {role: light_css for role, (light_css, _) in _COLOURS.items()}
    dark = {role: dark_css for role, (_, dark_css) in _COLOURS.items() if dark_css}
    return "".join(
        (
            f".remat-picture{{max-width:100%;height:auto;font:12px {_SANS}}}",
            ".remat-title{font-weight:600;font-size:15px}",
            ".remat-grid,.remat-axis{stroke-width:1;fill:none}",
            ".remat-hover{fill:transparent}",
            ".remat-line{stroke-width:2}",
            ".remat-bound,.remat-ring,.remat-baseline-dot{stroke-width:1.5}",
            ".remat-point{stroke-width:0.7}",
            _rules(light),
            f"@media screen and (prefers-color-scheme:dark){{{_rules(dark)}}}",
            "rect.remat-swatch{stroke:none}",
        )
    )


def _rules(colours: dict[str, str]) -> str:
    return "".join(f".remat-{role}{{{colour}}}" for role, colour in colours.items())
