"""The option `reserve`: bytes of a budget for other users of the memory, such as an optimizer."""

from __future__ import annotations

from remat.errors import BudgetError
from remat.limits.budget import Budget


def parse_reserve(reserve: int | str) -> int:
    """Return the reserve in bytes. Raises `BudgetError` unless it is a number of bytes, such as
    "2GiB"."""
    return parse_bytes(reserve, "reserve", "2GiB")


def parse_bytes(size: int | str, name: str, example: str) -> int:
    """Return an option in bytes; 0 is valid, too. Raises `BudgetError` with the option's name and
    an example unless it is a number of bytes."""
    if size in (0, "0"):
        return 0
    try:
        if (size_bytes := Budget.parse(size).size_bytes) is not None:
            return size_bytes
    except BudgetError:
        pass
    raise BudgetError(
        f'the {name} {str(size)[:80]!r} is not a number of bytes; pass bytes, such as "{example}"'
    )
