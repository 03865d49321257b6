"""What a plan leaves of a budget to others, such as an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from remat.errors import BudgetError, InfeasibleBudget
from remat.limits.budget import Budget, format_bytes


def parse_reserve(reserve: int | str) -> int:
    """Bytes to leave of a budget. Raises `BudgetError` for what is no number of bytes."""
    if reserve in (0, "0"):
        return 0
    try:
        if (size_bytes := Budget.parse(reserve).size_bytes) is not None:
            return size_bytes
    except BudgetError:
        pass
    raise BudgetError(f'the reserve {str(reserve)[:80]!r} is no number of bytes; pass "2GiB", say')


def less_reserve(budget: Budget, reserve_bytes: int) -> int:
    """The bytes of a budget without those that others need of it. Raises `BudgetError` where none
    are left, and for a budget that is no number of bytes."""
    if budget.size_bytes is None:
        raise BudgetError(
            f"the budget {budget.given!r} is of the step itself, so there is nothing to reserve of "
            'it; pass bytes, such as "8GiB", or "auto"'
        )
    if reserve_bytes >= budget.size_bytes:
        raise BudgetError(
            f"the reserve of {reserve_bytes:,} bytes is all of the budget of {budget.size_bytes:,} "
            "bytes; pass a larger budget"
        )
    return budget.size_bytes - reserve_bytes


@contextmanager
def telling(reserve_bytes: int, why: str = "are reserved") -> Iterator[None]:
    """Within it, an `InfeasibleBudget` is about the whole budget, with what is reserved of it."""
    try:
        yield
    except InfeasibleBudget as error:
        least = error.min_feasible_bytes
        if not reserve_bytes or least is None:
            raise
        raise InfeasibleBudget(
            f"{error} That is without the {format_bytes(reserve_bytes)} that {why}: with them, "
            f"pass at least {least + reserve_bytes:,} bytes.",
            min_feasible_bytes=least + reserve_bytes,
            is_proved=error.is_proved,
        ) from None
