"""Helpers for tables of text: alignment, grouping of layers, and the largest rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def align_columns(table: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a line for each row of the table. The first `left` columns are aligned to the left,
    the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def fold_layer_numbers(module: str) -> str:
    """Return a module's path with `*` for its numbers, so that all layers of a model share a
    line."""
    return _NUMBER.sub("*", module) or "(no module)"


def largest_rows(
    sums: Mapping[str, Sequence[float]], max_rows: int, rest: str = "more"
) -> list[tuple[str, Sequence[float]]]:
    """Return (name, sums) in descending order of the first sum. Rows after the first `max_rows`
    are added up in a last one, which is called "N `rest`"."""
    order = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    if others := order[max_rows:]:
        total = [sum(column) for column in zip(*(row for _, row in others), strict=True)]
        return [*order[:max_rows], (f"{len(others)} {rest}", total)]
    return order
