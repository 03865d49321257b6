"""Budgets as people write them: bytes, "8GiB", "7.5 GB", "60%", "min"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction

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
_LIMIT_SHARE = 10**80  # of a peak of up to 2**64 bytes, it is within that limit
_LONGEST = 100
_HINT = 'pass bytes as an int, or a string such as "8GiB", "7.5 GB", "512MiB", "60%" or "min"'


@dataclass(frozen=True, slots=True)
class Budget:
    """A number of bytes, a share, or (where both are None) "min": the smallest feasible budget.

    A share is of what a plan can change: p% is what libraries hold on the device whatever is run
    (cuBLAS workspaces, which are most of a small model's peak) + p% of the rest of the peak without
    recomputation. `given` is what it was read from; budgets are equal where they mean the same.
    """

    given: int | float | str = field(compare=False)
    size_bytes: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, given: int | float | str | Budget) -> Budget:
        """The budget as people write it; a `Budget` is one already. Fractions of a byte are rounded
        down. "auto" is an error: who knows the device asks `is_auto` first.

        Raises `BudgetError` for a wrong type, an unknown unit, NaN, infinity, zero and less.
        """
        if isinstance(given, Budget):
            return given
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise BudgetError(f"the budget is a {type(given).__name__}, {given!r}; {_HINT}")
        if isinstance(given, str):
            return cls._parse_text(given)
        if isinstance(given, float) and not math.isfinite(given):
            raise BudgetError(f"the budget is {given}; {_HINT}")
        if 0 < given < 1:
            raise BudgetError(
                f"the budget is {given} bytes; for a fraction of the peak without recomputation "
                f'pass "{given * 100:g}%"'
            )
        return cls(given, _positive(math.floor(given), given))

    @classmethod
    def _parse_text(cls, text: str) -> Budget:
        if is_auto(text):
            raise BudgetError(
                'the budget "auto" is what the device has free, so it needs a device; '
                "use it with remat.optimize, or " + _HINT
            )
        if text.strip().lower() == "min":
            return cls(text)
        match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
        if match is None:
            raise BudgetError(f"the budget {text[:_LONGEST]!r} is not a quantity; {_HINT}")
        number, unit = Fraction(match[1]), match[2]
        if unit == "%":
            if not 0 < number < 100 * _LIMIT_SHARE:
                raise BudgetError(
                    f"the budget {text!r} must be positive, and less than 1e80 peaks; {_HINT}"
                )
            return cls(text, share=number / 100)
        if unit.lower() not in _UNITS:
            raise BudgetError(
                f"the budget {text!r} has the unknown unit {unit!r}; "
                "units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and %"
            )
        return cls(text, _positive(math.floor(number * _UNITS[unit.lower()]), text))

    @property
    def is_min(self) -> bool:
        """Whether the smallest feasible budget is asked for."""
        return self.size_bytes is None and self.share is None

    def in_bytes(self, baseline_bytes: int, library_bytes: int = 0) -> int | None:
        """The bytes, None for "min". `baseline_bytes` is the peak without recomputation,
        `library_bytes` what libraries hold of it. `share_of_baseline` is the way back.

        Raises `BudgetError` for a share of less than a byte.
        """
        if self.share is None:
            return self.size_bytes
        share_bytes = math.floor(self.share * (baseline_bytes - library_bytes))
        return _positive(share_bytes and library_bytes + share_bytes, self.given)


def perhaps_a_share(size_bytes: int, held_bytes: int) -> str:
    """The end of a sentence about a budget that is too small, where it looks like a percentage
    without its sign; else ""."""
    if size_bytes > 100 or held_bytes < 10_000:
        return ""
    return f'; for {size_bytes}% of the peak without recomputation pass "{size_bytes}%"'


def is_auto(given: object) -> bool:
    """Whether it is "auto", what the device has free: no `Budget`, but a request to find one."""
    return isinstance(given, str) and given.strip().lower() == "auto"


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
    """The percentage that a peak is, as a fraction; the inverse of `Budget.in_bytes`. 1 where
    there is nothing to change."""
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
