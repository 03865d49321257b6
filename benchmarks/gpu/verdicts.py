"""Checks of the acceptance run: requirement, observation and verdict, stored as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["met", "missed", "skipped", "info"]
"""`info` marks a figure without a requirement."""


@dataclass(frozen=True)
class Check:
    """One row of the table: what was checked, the requirement, what was observed, and the verdict.

    A skipped check has the reason in `observed`. `figures` are the numbers behind the texts.
    """

    subject: str
    requirement: str
    observed: str
    verdict: Verdict
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Passes each check to `write` at once, so that a crash loses none of the earlier ones."""

    write: Callable[[Check], None]

    def judge(
        self, subject: str, requirement: str, observed: str, is_met: bool, **figures: Any
    ) -> None:
        """Report a check as met or missed."""
        verdict: Verdict = "met" if is_met else "missed"
        self.write(Check(subject, requirement, observed, verdict, figures))

    def info(self, subject: str, observed: str, **figures: Any) -> None:
        """Report a figure that has no requirement."""
        self.write(Check(subject, "", observed, "info", figures))

    def skip(self, subject: str, requirement: str, reason: str) -> None:
        """Report a check that cannot be made on this machine."""
        self.write(Check(subject, requirement, reason, "skipped"))


def json_lines_report(path: Path) -> Report:
    """Return a report that appends each check to a file, as a line of JSON."""

    def write(check: Check) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(check)) + "\n")

    return Report(write)


def read_checks(path: Path) -> list[Check]:
    """Return the checks in a file of JSON lines, without a last line that was cut off."""
    if not path.exists():
        return []
    checks = []
    for line in path.read_text().splitlines():
        try:
            checks.append(Check(**json.loads(line)))
        except ValueError:
            break
    return checks
