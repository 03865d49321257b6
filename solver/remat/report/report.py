"""`Report`: a result in facts, tables and notes, and its text.

A result returns its report, and `Described` gives it `describe()`. Text is plain, with aligned
columns; every number in it has a unit.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.limits.units import format_bytes

_LABEL_WIDTH = 10
"""The smallest number of characters before the text of a fact."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Fact(NamedTuple):
    """A line of a report with its label, "" on lines that continue the fact above."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. `alignment` has an "l" or "r" for each column, the last one for all
    further columns, too."""

    rows: Sequence[Sequence[str]]
    alignment: str = "lr"

    def lines(self) -> list[str]:
        """Return a line for each row."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        sides = self.alignment.ljust(len(widths), self.alignment[-1])
        return [
            "  ".join(
                text.ljust(width) if side == "l" else text.rjust(width)
                for text, width, side in zip(row, widths, sides, strict=False)
            ).rstrip()
            for row in self.rows
        ]


class Report:
    """Facts, tables and notes (text) in order, with an empty line between two parts. Empty parts
    are left out."""

    def __init__(self, *parts: Sequence[Fact] | Table | str) -> None:
        self.parts = [part for part in parts if part]

    def __str__(self) -> str:
        return "\n\n".join(map(_report_part_text, self.parts))


class Described:
    """A result that is printed as its report."""

    @abstractmethod
    def report(self) -> Report:
        """Return the report."""

    def describe(self) -> str:
        """Return the report as text: its figures with their units, and its tables."""
        return str(self.report())

    def __str__(self) -> str:
        return self.describe()


def _report_part_text(part: Sequence[Fact] | Table | str) -> str:
    """Return facts, a table or a note of a report as text."""
    if isinstance(part, str):
        return part
    if isinstance(part, Table):
        return "\n".join(part.lines())
    width = max(_LABEL_WIDTH, 1 + max(len(fact.label) for fact in part))
    return "\n".join(f"{fact.label:<{width}}{fact.text}" for fact in part)


def facts_of_lines(label: str, lines: Sequence[str]) -> list[Fact]:
    """Return a fact for each line; the first has the label."""
    return [Fact("" if number else label, line) for number, line in enumerate(lines)]


def facts_of_parts(parts_bytes: Mapping[str, int], total_bytes: int) -> list[Fact]:
    """Return a line for each part of `total_bytes` that has bytes: its name, bytes and share."""
    total = max(1, total_bytes)
    return [
        Fact("", f"{name:<20}{format_bytes(size):>10}  {size / total:>6.1%}")
        for name, size in parts_bytes.items()
        if size
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
