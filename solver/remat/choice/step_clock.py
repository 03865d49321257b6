"""`StepClock`: one time limit for a step, whose choices solve it in several forms.

A step with operations in pieces or tensors on the host is estimated, and solved in full, several
times. All of that ends at the time limit of the strategy. Each solve may take a share of the time
that remains, so that there is time for another one; most end earlier, at their gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from remat.choice.split import CHOICE_LIMIT_S
from remat.progress import Cancel, is_cancelled
from remat.strategies.base import Strategy, with_limits

_CHOICE_SHARE = 0.5
"""The share of the time limit in which pieces and tensors are chosen."""

_SOLVE_SHARES = (1.0, 0.6, 0.4)
"""The share of the remaining time that one solve may take, by the number of choices."""

_LEAST_SOLVE_S = 0.1
"""The time limit of a solve that starts at the end."""


@dataclass(frozen=True)
class StepClock:
    """The time limit of a step. As a `Cancel`, it is set once the limit is reached, or once
    `cancel` is. `now` reads the seconds of the clock."""

    strategy: Strategy
    deadline: float
    choices: int
    cancel: Cancel | None = None
    now: Callable[[], float] = time.monotonic

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        choices: int,
        cancel: Cancel | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> StepClock:
        """Return a clock that starts now, for a step with this number of choices: of pieces, and of
        tensors to offload. Choices are limited for strategies without a time limit, too."""
        limit_s = getattr(strategy, "time_limit", None)
        if not isinstance(limit_s, int | float):
            limit_s = CHOICE_LIMIT_S / _CHOICE_SHARE
        return cls(strategy, now() + limit_s, choices, cancel, now)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, zero after it."""
        return max(0.0, self.deadline - self.now())

    @property
    def choice_limit_s(self) -> float:
        """The seconds that each choice may take from now on."""
        share = _CHOICE_SHARE / max(1, self.choices)
        return min(CHOICE_LIMIT_S, share * self.remaining_s)

    def next_strategy(self, *, is_last: bool = False) -> Strategy:
        """Return the strategy for a solve that starts now; the last one may take all of the time
        that remains."""
        share = 1.0 if is_last else _SOLVE_SHARES[self.choices]
        limit_s = max(_LEAST_SOLVE_S, share * self.remaining_s)
        return with_limits(self.strategy, time_limit=limit_s)

    def is_set(self) -> bool:
        """True if no choice is to go on."""
        return is_cancelled(self.cancel) or self.now() >= self.deadline
