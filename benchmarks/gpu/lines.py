"""What a part of the run says: lines of what is wanted, what was found, and whether that is met."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["met", "missed", "skipped", "told"]


@dataclass(frozen=True)
class Line:
    """One row of the table. "told" is a figure of which nothing is wanted; the reason for what is
    skipped is in `found`."""

    what: str
    want: str
    found: str
    verdict: Verdict
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Takes lines, each at once: what was found before a crash is kept."""

    write: Callable[[Line], None]

    def judge(self, what: str, want: str, found: str, is_met: bool, **figures: Any) -> None:
        """Something is wanted, and is so or not."""
        self.write(Line(what, want, found, "met" if is_met else "missed", figures))

    def tell(self, what: str, found: str, **figures: Any) -> None:
        """A figure that belongs into the result."""
        self.write(Line(what, "", found, "told", figures))

    def skip(self, what: str, want: str, reason: str) -> None:
        """It could not be found out here."""
        self.write(Line(what, want, reason, "skipped"))


def into(path: Path) -> Report:
    """A report whose lines are appended to a file, as JSON."""

    def write(line: Line) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")

    return Report(write)


def read(path: Path) -> list[Line]:
    """The lines of a file. One that was cut off at the end is left out."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(Line(**json.loads(text)))
        except ValueError:
            break
    return found
