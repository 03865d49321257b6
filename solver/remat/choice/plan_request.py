"""`PlanRequest`: the memory that the plan of a step may take, and what it may do to the step; and
`StepClock`: one time limit for all solves of a step.

Choosing pieces or tensors to offload takes several quick solves and several full ones. All of them
end at the time limit of the strategy. Each full solve may take a share of the remaining time, so
that some is left for the next one; most solves reach their gap earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.split import CHOICE_LIMIT_S
from remat.limits.infeasible import INFEASIBLE_ERROR
from remat.limits.limits import Limits
from remat.progress import Cancel, is_cancelled
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, with_limits


@dataclass(frozen=True)
class PlanRequest:
    """The input of `plan_step`, for all entry points.

    `limits` are the budget and what others need of it; `segments_bytes`, if given, limits what
    torch's allocator reserves. Operations may be split into one of these numbers of `pieces`, and
    tensors offloaded within the limits of `offload`: () splits nothing, None offloads nothing. All
    solves together take the time limit of `strategy`. `infeasible` is "error" or "smallest".
    """

    limits: Limits
    strategy: Strategy = field(default_factory=Auto)
    pieces: tuple[int, ...] = ()
    offload: OffloadLimits | None = None
    infeasible: str = INFEASIBLE_ERROR
    segments_bytes: int | None = None


_CHOICE_SHARE = 0.5
"""The share of the time limit for choosing pieces and tensors to offload."""

_SOLVE_SHARES = (1.0, 0.6, 0.4)
"""The share of the remaining time for one full solve, indexed by the number of choices."""

_LEAST_SOLVE_S = 0.1
"""The minimum time limit of a solve, also after the deadline."""


@dataclass(frozen=True)
class StepClock:
    """The time limit of a step. It is a `Cancel`, which is set after `deadline` or when `cancel` is
    set. `choices` is the number of choices (pieces, tensors to offload). `now` returns the time."""

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
        """Return a clock that starts now. A strategy without a time limit gets one of twice
        `CHOICE_LIMIT_S`, which limits the choices."""
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
        """The time limit of each choice in seconds, if it starts now."""
        share = _CHOICE_SHARE / max(1, self.choices)
        return min(CHOICE_LIMIT_S, share * self.remaining_s)

    def next_strategy(self, *, is_last: bool = False) -> Strategy:
        """Return the strategy for a full solve that starts now. With `is_last`, it may take all of
        the remaining time."""
        share = 1.0 if is_last else _SOLVE_SHARES[self.choices]
        limit_s = max(_LEAST_SOLVE_S, share * self.remaining_s)
        return with_limits(self.strategy, time_limit=limit_s)

    def is_set(self) -> bool:
        """True if the step is cancelled or its time limit is reached."""
        return is_cancelled(self.cancel) or self.now() >= self.deadline
