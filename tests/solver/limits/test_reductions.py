"""The loop that lowers a budget: until a judge accepts, and otherwise the least excess."""

from __future__ import annotations

import pytest

from remat.errors import InfeasibleBudget, RematError
from remat.limits.reductions import MAX_BUDGET_REDUCTIONS, Verdict, lower_until_accepted
from remat.progress import Clock


class Solves:
    """Plans are their budgets; a judge measures the bytes of each."""

    def __init__(self, measured: dict[int, int], allowed: int = 100) -> None:
        self.measured, self.allowed = measured, allowed
        self.budgets: list[int] = []

    def solve(self, budget: int) -> int:
        self.budgets.append(budget)
        if budget not in self.measured:
            raise InfeasibleBudget("too small")
        return budget

    def judge(self, plan: int) -> Verdict:
        excess = self.measured[plan] - self.allowed
        return Verdict(excess, excess)

    def best(self, clock: Clock | None = None) -> int:
        return lower_until_accepted(100, 100, self.solve, self.judge, clock)


@pytest.mark.parametrize(
    ("measured", "budgets", "best"),
    [
        ({100: 100}, [], 100),  # fits at once
        ({100: 110, 90: 99}, [90], 90),
        ({100: 110, 90: 104, 86: 100}, [90, 86], 86),  # lowered from the lowered budget
        ({100: 110, 90: 105}, [90, 85], 90),  # infeasible: the least excess
        ({100: 110, 90: 120, 70: 108, 62: 115}, [90, 70, 62], 70),
        ({100: 300}, [], 100),  # nothing would be left
    ],
)
def test_budgets_are_lowered_by_the_excess(
    measured: dict[int, int], budgets: list[int], best: int
) -> None:
    solves = Solves(measured)
    assert solves.best() == best
    assert solves.budgets == budgets
    assert len(budgets) <= MAX_BUDGET_REDUCTIONS


def test_a_judge_may_say_that_no_lower_budget_helps() -> None:
    solves = Solves({100: 110})
    assert lower_until_accepted(100, 100, solves.solve, lambda plan: Verdict(10, 0)) == 100
    assert not solves.budgets


def test_no_budget_is_tried_after_the_end_of_the_clock() -> None:
    solves = Solves({100: 110, 90: 99})
    assert solves.best(Clock.of(0.0)) == 100
    assert not solves.budgets


def test_other_errors_are_raised() -> None:
    def fail(budget: int) -> int:
        raise RematError("broken")

    solves = Solves({100: 110})
    with pytest.raises(RematError, match="broken"):
        lower_until_accepted(100, 100, fail, solves.judge)
