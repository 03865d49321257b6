"""Arguments of `remat.fit` and `Client.fit`: what torch's allocator may reserve, the batch, and
the time limit."""

from __future__ import annotations

from remat.errors import BudgetError, RematError
from remat.limits.reserve import parse_bytes


def parse_memory(memory: int | str) -> int:
    """Return the bytes that torch's allocator may reserve. Raises `BudgetError`."""
    if isinstance(memory, bool) or not isinstance(memory, (int, str)) or memory in (0, "0"):
        raise BudgetError(
            f"the memory is {str(memory)[:80]!r}; pass what torch's allocator may reserve, bytes "
            'above 0 or "75GiB"'
        )
    return parse_bytes(memory, "memory", "75GiB")


def check_time_limit(time_limit: float) -> None:
    """Raise `RematError` if the time limit is no number of seconds above 0."""
    is_number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if not is_number or not time_limit > 0:
        raise RematError(
            f"the time limit is {str(time_limit)[:80]!r}; pass seconds above 0, such as 12, or "
            "math.inf"
        )


def check_batch(batch: int | None) -> None:
    """Raise `RematError` if the batch size is no number from 1 on."""
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise RematError(
            f"the batch is {str(batch)[:80]!r}; pass the batch size of the example inputs, an "
            "integer from 1 on"
        )
