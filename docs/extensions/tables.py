"""Tables of plain text as docutils nodes."""

from __future__ import annotations

from collections.abc import Sequence

from docutils import nodes

Cell = str | Sequence[nodes.Node]
"""Text with code between backticks, or inline nodes."""


def inline(text: str) -> list[nodes.Node]:
    """Return text with code between backticks as docutils nodes."""
    return [
        nodes.literal(part, part) if number % 2 else nodes.Text(part)
        for number, part in enumerate(text.split("`"))
        if part
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> nodes.table:
    """Return a docutils table with one header row."""
    group = nodes.tgroup("", cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    group += nodes.thead("", _row(header))
    group += nodes.tbody("", *(_row(row) for row in rows))
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: Sequence[Cell]) -> nodes.row:
    return nodes.row(
        "",
        *(
            nodes.entry(
                "",
                nodes.paragraph(
                    "", "", *(inline(cell) if isinstance(cell, str) else cell)
                ),
            )
            for cell in cells
        ),
    )
