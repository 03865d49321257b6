"""Reading of benchmark result files, and the tables that are made of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Table:
    """A table with the names of its result files."""

    sources: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@cache
def load(name: str) -> dict[str, Any]:
    """Return the content of the newest result file with this name."""
    return json.loads(newest(name).read_text())


def newest(name: str) -> Path:
    """Return the path of the result file with this name and the latest date."""
    dated = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(name)}\.json")
    return max(path for path in RESULTS.iterdir() if dated.fullmatch(path.name))


def percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage, 0.0206 as "2.1%", with one more digit for small shares."""
    if abs(share) < 0.00005:
        return "0%"
    if abs(share) < 0.0005:
        digits = max(digits, 2)
    return f"{100 * share:.{digits}f}%"


def seconds(time_s: float) -> str:
    """Format seconds, with a decimal only for less than one second."""
    return f"{time_s:.1f} s" if time_s < 0.95 else f"{time_s:.0f} s"
