"""`Budget`: the largest allowed peak, parsed from bytes, "8GiB", "7.5 GB", "60%" or "min"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral

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
_QUANTITY = re.compile(
    r"([+-]?\d+(?:_\d+)*(?:\.\d*)?|[+-]?\.\d+)\s*([a-z]*|%)", re.IGNORECASE | re.ASCII
)
_MAX_BYTES = 10**100
_MAX_SHARE = 10**80  # of a peak of up to 2**64 bytes, this is less than _MAX_BYTES
_MAX_LENGTH = 100
_HINT = 'pass bytes as an int, or a string such as "8GiB", "7.5 GB", "512MiB", "60%" or "min"'


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest allowed peak: `size_bytes`, a `share` of the baseline's peak (0.6 for "60%"), or
    "min", the smallest feasible peak, where both are None.

    A share applies to the memory that a plan can change: p% stands for the bytes that libraries
    allocate whatever is run (cuBLAS workspaces, which are most of a small model's peak) + p% of the
    rest of the peak without recomputation. `requested` is the value that the budget was parsed
    from; budgets with the same meaning are equal.
    """

    requested: int | float | str = field(compare=False)
    size_bytes: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, requested: int | float | str | Budget, *, may_be_zero: bool = False) -> Budget:
        """Parse a budget as users write it; return a `Budget` unchanged. Rounds fractions of a byte
        down. "auto" is an error, as it depends on a device: callers check `is_auto` first.

        Raises `BudgetError` for a wrong type, an unknown unit, NaN, infinity, less than zero, and,
        unless it `may_be_zero`, zero bytes.
        """
        if isinstance(requested, Budget):
            return requested
        if isinstance(requested, Integral) and not isinstance(requested, bool):
            requested = int(requested)  # NumPy's integers too
        if isinstance(requested, bool) or not isinstance(requested, (int, float, str)):
            raise BudgetError(f"the budget is a {type(requested).__name__}, {requested!r}; {_HINT}")
        if isinstance(requested, str):
            return cls._parse_text(requested, may_be_zero=may_be_zero)
        if isinstance(requested, float) and not math.isfinite(requested):
            raise BudgetError(f"the budget is {requested}; {_HINT}")
        _check_no_fraction_of_byte(requested)
        size_bytes = math.floor(requested)
        return cls(requested, _check_budget_size(size_bytes, requested, may_be_zero=may_be_zero))

    @classmethod
    def _parse_text(cls, text: str, *, may_be_zero: bool) -> Budget:
        if is_auto(text):
            raise BudgetError(
                'the budget "auto" is what the device has free, so it needs a device; '
                "use it with remat.optimize, or " + _HINT
            )
        if text.strip().lower() == "min":
            return cls(text)
        match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _MAX_LENGTH else None
        if match is None:
            raise BudgetError(f"the budget {text[:_MAX_LENGTH]!r} is not a quantity; {_HINT}")
        number, unit = Fraction(match[1].replace("_", "")), match[2]
        if unit == "%":
            if not 0 < number < 100 * _MAX_SHARE:
                raise BudgetError(
                    f"the budget {text!r} must be positive, and less than 1e80 peaks; {_HINT}"
                )
            return cls(text, share=number / 100)
        if unit.lower() not in _UNITS:
            raise BudgetError(
                f"the budget {text!r} has the unknown unit {unit!r}; "
                "units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and %"
            )
        size_bytes = number * _UNITS[unit.lower()]
        _check_no_fraction_of_byte(size_bytes)
        return cls(text, _check_budget_size(math.floor(size_bytes), text, may_be_zero=may_be_zero))

    @property
    def is_min(self) -> bool:
        """True if the smallest feasible peak is requested."""
        return self.size_bytes is None and self.share is None

    def in_bytes(self, baseline_bytes: int, library_bytes: int = 0) -> int | None:
        """Return the budget in bytes; None for "min".

        `baseline_bytes` is the peak without recomputation, of which libraries allocate
        `library_bytes`. `share_of_baseline` is the inverse. A share of less than a byte is 0 bytes,
        which a step without memory fits, and no other.
        """
        if self.share is None:
            return self.size_bytes
        return library_bytes + math.floor(self.share * (baseline_bytes - library_bytes))


def missing_percent_sign_hint(budget_bytes: int, required_bytes: int) -> str:
    """Return the end of an error about a budget that is too small: a hint to pass a percentage if
    the budget is at most 100 bytes, and far below the `required_bytes`; else ""."""
    if budget_bytes > 100 or required_bytes < 10_000:
        return ""
    return f'; for {budget_bytes}% of the peak without recomputation pass "{budget_bytes}%"'


def is_auto(requested: object) -> bool:
    """True if the requested budget is "auto": the free memory of the step's device."""
    return isinstance(requested, str) and requested.strip().lower() == "auto"


def _check_no_fraction_of_byte(size_bytes: float | Fraction) -> None:
    """Raise `BudgetError` for less than a byte, probably meant as a fraction of the peak."""
    if 0 < size_bytes < 1:
        raise BudgetError(
            f"the budget is {float(size_bytes):g} bytes; for a fraction of the peak without "
            f'recomputation pass "{float(size_bytes * 100):g}%"'
        )


def _check_budget_size(size_bytes: int, requested: object, *, may_be_zero: bool) -> int:
    """Return the size. Raise `BudgetError` unless it is positive, or zero where that is valid, and
    less than 1e100 bytes."""
    if size_bytes < 0 or (size_bytes == 0 and not may_be_zero):
        raise BudgetError(
            f"the budget {str(requested)[:80]!r} is {str(size_bytes)[:80]} bytes; it must be "
            "positive"
        )
    if size_bytes >= _MAX_BYTES:
        raise BudgetError(
            f"the budget {str(requested)[:80]!r} is over 1e100 bytes, more than any memory; {_HINT}"
        )
    return size_bytes


def share_of_baseline(peak_bytes: int, *, baseline_bytes: int, library_bytes: int = 0) -> float:
    """Return a peak as a fraction of the baseline's peak, both without the memory of libraries; 1
    where the baseline has no other memory. This is the inverse of `Budget.in_bytes`."""
    changeable_bytes = baseline_bytes - library_bytes
    return (peak_bytes - library_bytes) / changeable_bytes if changeable_bytes > 0 else 1.0
