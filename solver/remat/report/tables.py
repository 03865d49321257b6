"""Tables of text, and what goes into them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def align_columns(table: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def fold_layer_numbers(module: str) -> str:
    """A module's path without numbers, so that the layers of a model share a line."""
    return _NUMBER.sub("*", module) or "(no module)"


def largest_rows(
    sums: Mapping[str, Sequence[float]], most: int, rest: str = "more"
) -> list[tuple[str, Sequence[float]]]:
    """Names with their sums, ordered by the first of these; what is beyond `most` is one row."""
    order = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    if others := order[most:]:
        added = [sum(column) for column in zip(*(row for _, row in others), strict=True)]
        return [*order[:most], (f"{len(others)} {rest}", added)]
    return order
