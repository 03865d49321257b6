"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for line in table:
        first, *others = (
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return lines
