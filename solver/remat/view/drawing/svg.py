"""Writing SVG: escaped elements, short numbers, and one palette for light and dark.

The hues are those of Okabe and Ito (2008), which people who confuse red and green can tell apart.
What lies beside each other also differs in lightness, for paper and for eyes without colour.
Elements carry classes, and the style sheet gives a class its colour twice: for light, and
for screens that prefer dark; paper always gets the light one. Classes begin with `remat-` because
the style sheet of an SVG inside a page holds for the whole page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from remat.view.drawing.text import escape

CHARACTER_WIDTH = 6.5
"""Average width in pixels of a character of the labels; nothing here can measure text."""

_HEX = re.compile("#[0-9a-f]{6}")

_SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"

_COLOURS = {
    "paper": ("fill:#ffffff", "fill:#16181c"),
    "label": ("fill:#4a4a4a", "fill:#b4b8bf"),
    "title": ("fill:#1a1a1a", "fill:#f0f0f0"),
    "grid": ("stroke:#dddddd", "stroke:#33373d"),
    "axis": ("stroke:#888888", "stroke:#7d828a"),
    "eager": ("fill:#e4e4e4;stroke:#b5b5b5", "fill:#2b2e34;stroke:#565b63"),
    "constant": ("fill:#858585", "fill:#5c6067"),
    "results": ("fill:#005f99", "fill:#1f8fd0"),
    "kept": ("fill:#5db8ec", "fill:#8ccbf2"),
    "passing": ("fill:#b5578f", "fill:#c2639a"),
    "again": ("fill:#f5b83d", "fill:#f0ab1f"),
    "workspace": ("fill:#004d3a", "fill:#00785a"),
    "budget": ("stroke:#d55e00;fill:#d55e00", "stroke:#ff8c3b;fill:#ff8c3b"),
    "budget-label": ("fill:#b34e00", "fill:#ff8c3b"),
    "mark": ("stroke:#1a1a1a;fill:#1a1a1a", "stroke:#f0f0f0;fill:#f0f0f0"),
    "held": ("stroke:#a3d3f3;fill:#a3d3f3", "stroke:#255a7d;fill:#255a7d"),
    "held-again": ("stroke:#f2b544;fill:#f2b544", "stroke:#936a0e;fill:#936a0e"),
    "held-result": ("stroke:#e2e2e2;fill:#e2e2e2", "stroke:#3a3d44;fill:#3a3d44"),
    "run": ("stroke:#005f99;fill:#005f99", "stroke:#56b4e9;fill:#56b4e9"),
    "rerun": ("stroke:#d55e00;fill:#d55e00", "stroke:#ff8c3b;fill:#ff8c3b"),
    "line": ("stroke:#005f99;fill:none", "stroke:#56b4e9;fill:none"),
    "bound": ("stroke:#555555;fill:none", "stroke:#b4b8bf;fill:none"),
    "bound-dot": ("fill:#555555", "fill:#b4b8bf"),
    "point": ("stroke:#333333", "stroke:#16181c"),
    "ring": ("fill:none", ""),
    "eager-dot": ("stroke:#1a1a1a;fill:#ffffff", "stroke:#f0f0f0;fill:#16181c"),
}
"""Of each role: for light, and for dark where that is another."""

MARGIN = 16.0
"""Pixels left of everything, and right of it."""

TITLE_Y, SUMMARY_Y = 26.0, 46.0

SERIES = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#8c8c8c")
"""Fill colours for any number of things beside each other, on light and on dark."""


def number(value: float) -> str:
    """A coordinate with at most two decimals and nothing superfluous."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """One element. `children` are elements already; attribute values are escaped. `class_` is
    `class`, and underscores stand for hyphens; attributes that are None are left out."""
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
    """A label at (x, y). `anchor` is "middle" or "end"; `tip` is shown to a resting pointer."""
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
    """What shows when the pointer rests on the element that this is the first child of."""
    return f"<title>{escape(content)}</title>"


def rectangle(
    x: float, y: float, width: float, height: float, role: str, tip: str | None = None
) -> str:
    """A filled rectangle."""
    children = () if tip is None else (tooltip(tip),)
    return element("rect", *children, x=x, y=y, width=width, height=height, class_=f"remat-{role}")


def heading(title: str, summary: str) -> list[str]:
    """The title and the line below it."""
    return [
        text(MARGIN, TITLE_Y, title, role="title"),
        text(MARGIN, SUMMARY_Y, summary),
    ]


def colour(role: str) -> str:
    """The light colour of a role, for those who write no style sheet."""
    return _HEX.findall(_COLOURS[role][0])[0]


def line(
    x1: float, y1: float, x2: float, y2: float, role: str, dash: str | None = None, **more: float
) -> str:
    """A straight line, one pixel wide if nothing else is said."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return element("line", **ends, class_=f"remat-{role}", stroke_dasharray=dash, **more)


def path(data: str, role: str, tip: str | None = None, **attributes: str | float | None) -> str:
    """A path; `data` is its `d`."""
    children = () if tip is None else (tooltip(tip),)
    return element("path", *children, d=data, class_=f"remat-{role}", **attributes)


def legend(
    entries: Iterable[tuple[str, str]], x: float, y: float, width: float
) -> tuple[list[str], float]:
    """Swatches with words, (role, words) each, from (x, y) on in rows of `width`; and the y below
    the last row."""
    parts: list[str] = []
    at = x
    for role, words in entries:
        needed = 16 + CHARACTER_WIDTH * len(words) + 16
        if at > x and at + needed > x + width:
            at, y = x, y + 18
        parts.append(rectangle(at, y - 9, 11, 11, f"{role} remat-swatch"))
        parts.append(text(at + 16, y, words))
        at += needed
    return parts, y + 18


def document(width: float, height: float, title: str, summary: str, body: Iterable[str]) -> str:
    """A whole picture. `title` and `summary` are what screen readers say; the title shows as the
    tooltip of the whole."""
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
    """The style sheet that every picture carries."""
    light = {role: of_light for role, (of_light, _) in _COLOURS.items()}
    dark = {role: of_dark for role, (_, of_dark) in _COLOURS.items() if of_dark}
    return "".join(
        (
            f".remat-picture{{max-width:100%;height:auto;font:12px {_SANS}}}",
            ".remat-title{font-weight:600;font-size:15px}",
            ".remat-grid,.remat-axis{stroke-width:1;fill:none}",
            ".remat-hover{fill:transparent}",
            ".remat-line{stroke-width:2}.remat-bound,.remat-ring,.remat-eager-dot{stroke-width:1.5}",
            ".remat-point{stroke-width:0.7}",
            _rules(light),
            f"@media screen and (prefers-color-scheme:dark){{{_rules(dark)}}}",
            "rect.remat-swatch{stroke:none}",
        )
    )


def _rules(colours: dict[str, str]) -> str:
    return "".join(f".remat-{role}{{{colour}}}" for role, colour in colours.items())
