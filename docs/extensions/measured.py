"""Files of measured results, and what a table of them is."""

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
    """A table and the files that it is from."""

    sources: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@cache
def load(name: str) -> dict[str, Any]:
    """The newest file of results of this name."""
    return json.loads(newest(name).read_text())


def newest(name: str) -> Path:
    """The file of results of this name with the latest date."""
    dated = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(name)}\.json")
    return max(path for path in RESULTS.iterdir() if dated.fullmatch(path.name))


def percent(share: float, digits: int = 1) -> str:
    """`0.0206` as "2.1%"; where that leaves nothing, one digit more."""
    if abs(share) < 0.00005:
        return "0%"
    if abs(share) < 0.0005:
        digits = max(digits, 2)
    return f"{100 * share:.{digits}f}%"


def seconds(time_s: float) -> str:
    """Seconds with one digit below one, else none."""
    return f"{time_s:.1f} s" if time_s < 0.95 else f"{time_s:.0f} s"
