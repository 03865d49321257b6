"""Record of a running benchmark: rows are printed and written to the dated file one by one."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.report import Row

Columns = Sequence[tuple[str, int]]
"""Column titles with their widths; a negative width aligns to the left."""


class ResultRecord:
    """A result that is printed row by row, and written to a file in `folder` if there is one."""

    def __init__(self, folder: Path | None, name: str, head: dict[str, Any]) -> None:
        self.folder = folder
        self.name = name
        self.result: dict[str, Any] = {**head, "sections": {}}
        self.path: Path | None = None
        self._columns: Columns = ()
        self._began = time.monotonic()

    def begin_section(self, section: str, title: str, columns: Columns) -> None:
        """Start a section and print the head of its table."""
        self.result["sections"].setdefault(section, [])
        self._columns = columns
        print(f"\n{section}: {title}")
        self._print([name for name, _ in columns])

    def add_row(self, section: str, row: Row, cells: Sequence[object]) -> None:
        """Store a row, and print its cells."""
        self.result["sections"][section].append(row)
        self.print_row(cells)
        self._write()

    def print_row(self, cells: Sequence[object]) -> None:
        """Print a line of the table that is not stored as a row."""
        self._print([cell_text(cell) for cell in cells])

    def add_summary(self, section: str, key: str, facts: object) -> None:
        """Store a fact about a whole section."""
        self.result.setdefault("summaries", {}).setdefault(section, {})[key] = facts
        self._write()

    def print_progress(self, text: str) -> None:
        """Print to stderr what runs now."""
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", file=sys.stderr, flush=True)

    def _print(self, cells: Sequence[str]) -> None:
        line = "  ".join(
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
            for cell, (_, width) in zip(cells, self._columns, strict=True)
        )
        print(line.rstrip(), flush=True)

    def _write(self) -> None:
        if self.folder is not None:
            self.path = report.write_result(self.folder, self.name, self.result)


def cell_text(cell: object) -> str:
    """Return a table cell as text: "" for None, "yes" or "NO" for a verdict."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    return str(cell)


def format_percent(share: float | None, decimals: int = 2) -> str | None:
    """Return a share as a percentage, or None for None."""
    return None if share is None else f"{100 * share:.{decimals}f}%"


def format_decimal(number: float | None, decimals: int = 1) -> str | None:
    """Return a number as text with a number of decimals, or None for None."""
    return None if number is None else f"{number:.{decimals}f}"


def format_mib(size_bytes: float | None) -> str | None:
    """Return bytes in MiB as text, or None for None."""
    return None if size_bytes is None else f"{size_bytes / 2**20:.0f}"


def all_met(*conditions: bool | None) -> bool | None:
    """True if all conditions that are not None are true; None if all are None."""
    applicable = [condition for condition in conditions if condition is not None]
    return all(applicable) if applicable else None
