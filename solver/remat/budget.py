"""Budgets as people write them: bytes, "8GiB", "7.5 GB", "60%", "min"."""

from __future__ import annotations

import math
import re
from typing import Literal

from remat.errors import BudgetError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([a-z]*|%)", re.IGNORECASE | re.ASCII)
_LIMIT_BYTES = 10**100
_HINT = 'pass bytes as an int, or a string such as "8GiB", "7.5 GB", "512MiB", "60%" or "min"'


def parse_budget(
    budget: int | float | str, *, baseline_bytes: int, library_bytes: int = 0
) -> int | Literal["min"]:
    """A budget in bytes, or "min" (the smallest feasible one, which the solver looks for).

    A percentage is of what a plan can change: p% is `library_bytes` + p% of (`baseline_bytes` -
    `library_bytes`). `baseline_bytes` is the peak without recomputation, `library_bytes` what
    libraries hold of it on the device whatever is run (cuBLAS workspaces, which are most of a small
    model's peak). `share_of_baseline` is the way back. Fractions of a byte are rounded down. "auto"
    is for the caller to resolve, who knows the device: here it is an error.

    Raises `BudgetError` for a wrong type, an unknown unit, NaN, infinity, zero and less.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise BudgetError(f"the budget is a {type(budget).__name__}, {budget!r}; {_HINT}")
    if isinstance(budget, str):
        return _parse_text(budget, baseline_bytes, library_bytes)
    if isinstance(budget, float) and not math.isfinite(budget):
        raise BudgetError(f"the budget is {budget}; {_HINT}")
    if 0 < budget < 1:
        raise BudgetError(
            f"the budget is {budget} bytes; for a fraction of the peak without recomputation "
            f'pass "{budget * 100:g}%"'
        )
    return _positive(math.floor(budget), budget)


def _parse_text(text: str, baseline_bytes: int, library_bytes: int) -> int | Literal["min"]:
    stripped = text.strip()
    if stripped.lower() == "min":
        return "min"
    if stripped.lower() == "auto":
        raise BudgetError(
            'the budget "auto" is what the device has free, so it needs a device; '
            "use it with remat.optimize, or " + _HINT
        )
    match = _QUANTITY.fullmatch(stripped)
    if match is None:
        raise BudgetError(f"the budget {text!r} is not a quantity; {_HINT}")
    number, unit = match.groups()
    if unit == "%":
        share_bytes = _scale(number, baseline_bytes - library_bytes, 100)
        return _positive(share_bytes and library_bytes + share_bytes, text)
    if unit.lower() not in _UNITS:
        raise BudgetError(
            f"the budget {text!r} has the unknown unit {unit!r}; "
            "units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and %"
        )
    return _positive(_scale(number, _UNITS[unit.lower()], 1), text)


def _scale(number: str, unit: int, divisor: int) -> int:
    """`number * unit / divisor` rounded down, exact for any number of digits."""
    whole, _, decimals = number.partition(".")
    return int(whole + decimals) * unit // (divisor * 10 ** len(decimals))


def _positive(size_bytes: int, given: object) -> int:
    if size_bytes <= 0:
        raise BudgetError(
            f"the budget {str(given)[:80]!r} is {str(size_bytes)[:80]} bytes; it must be positive"
        )
    if size_bytes >= _LIMIT_BYTES:
        raise BudgetError(
            f"the budget {str(given)[:80]!r} is over 1e100 bytes, more than any memory; {_HINT}"
        )
    return size_bytes


def share_of_baseline(peak_bytes: int, *, baseline_bytes: int, library_bytes: int = 0) -> float:
    """The percentage that a peak is, as a fraction; the inverse of `parse_budget`. 1 where there is
    nothing to change."""
    whole = baseline_bytes - library_bytes
    return (peak_bytes - library_bytes) / whole if whole > 0 else 1.0


def format_bytes(size_bytes: int | float) -> str:
    """Bytes for people, in binary units with three or four digits: "7.45 GiB"."""
    sign, size = ("-" if size_bytes < 0 else ""), abs(float(size_bytes))
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    decimals = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{decimals}f} {unit}"


def format_seconds(time_s: float) -> str:
    """Seconds for people, with up to three digits: "12.3 ms", "1,234 s"."""
    if abs(time_s) >= 999.5:
        return f"{time_s:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        text = f"{time_s * factor:.3g}"  # what is rounded up to 1,000 is 1 of the next unit
        if abs(float(text)) >= 1:
            return f"{text} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s else "0 s"
