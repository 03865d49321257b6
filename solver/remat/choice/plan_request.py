"""`PlanRequest`: the memory that the plan of a step may take, and what it may do to the step;
`TraceSolver`: solves the forms of the step, all within one time limit; and `TracePlan`, the answer.

Choosing pieces or tensors to offload takes several quick solves and several full ones. All of them
end at the time limit of the strategy. Each full solve may take a share of the remaining time, so
that some is left for the next one; most solves reach their gap earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from remat.choice.candidate_log import CandidateLog
from remat.choice.offloadable_step import TraceStep
from remat.choice.offloaded_forms import OffloadLimits
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.budget import Budget
from remat.limits.limits import INFEASIBLE_ERROR, Limits
from remat.plan import Plan
from remat.progress import Cancel, Clock
from remat.schedule import Schedule
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, clock_of, within_clock


@dataclass(frozen=True)
class PlanRequest:
    """The input of `plan_step`, for all entry points.

    `limits` are the budget and what others need of it. Operations may be split into one of these
    numbers of `pieces`, and tensors offloaded within the limits of `offload`: () splits nothing,
    None offloads nothing. All solves together take the time limit of `strategy`. `infeasible` is
    "error" or "smallest". The budget is for `in_flight` calls of the model before a backward.
    """

    limits: Limits
    strategy: Strategy = field(default_factory=Auto)
    pieces: tuple[int, ...] = ()
    offload: OffloadLimits | None = None
    infeasible: str = INFEASIBLE_ERROR
    in_flight: int = 1

    @property
    def choices(self) -> int:
        """The number of choices to make, 0 to 2: pieces, and tensors to offload."""
        return bool(self.pieces) + (self.offload is not None)

    def clock(self, cancel: Cancel | None = None) -> Clock:
        """Return the time limit of all solves together, from now. A strategy without a time limit
        gets one of twice `CHOICE_LIMIT_S`, which limits the choices."""
        clock = clock_of(self.strategy, cancel)
        return clock if clock.limit_s < math.inf else clock.limited_to(2 * CHOICE_LIMIT_S)


class TracePlan(NamedTuple):
    """A plan and the trace that it is for, in which operations may be split and tensors
    offloaded."""

    trace: Trace
    plan: Plan


CHOICE_LIMIT_S = 60.0
"""The largest time limit of a choice."""

_CHOICE_SHARE = 0.5
"""The share of the time limit for choosing pieces and tensors to offload."""

_SOLVE_SHARES = (1.0, 0.6, 0.4)
"""The share of the remaining time for one full solve, indexed by the number of choices."""

FormPlanner = Callable[[Trace, Budget, Strategy, Schedule | None], Plan]
"""Solves a step in one form within a budget, by a strategy, from a schedule if there is one."""


class TraceSolver:
    """Solves the forms of a step (a `FormSolver`). All solves end with `clock`, and each of the
    choices ends after `choice_limit_s`.

    `budget` is the budget of the step, and `budget_bytes` the same in bytes. `plan_form` solves
    one form. `measure` adds costs to the operations of a form that have none.
    """

    def __init__(
        self,
        request: PlanRequest,
        budget: Budget,
        budget_bytes: int | None,
        clock: Clock,
        plan_form: FormPlanner,
        measure: Callable[[Trace], Trace],
    ) -> None:
        self.log = CandidateLog()
        self.clock = clock
        self.measure = measure
        self.budget_bytes = budget_bytes
        self._budget = budget
        self._strategy = request.strategy
        self._plan_form = plan_form
        self._share = _SOLVE_SHARES[request.choices]
        choice_s = _CHOICE_SHARE / max(1, request.choices) * max(0.0, clock.remaining_s)
        self.choice_limit_s = min(CHOICE_LIMIT_S, choice_s)

    def next_strategy(self) -> Strategy:
        """Return the strategy for a full solve that starts now."""
        return within_clock(self._strategy, self.clock, self._share)

    def solve(
        self, step: TraceStep, budget_bytes: int | None, start: Schedule | None = None
    ) -> Plan:
        """Return the plan of a form of the step; `start` is a schedule of it to improve. Raises the
        errors of `remat.solve`."""
        budget = self._budget
        if budget_bytes != self.budget_bytes:
            budget = Budget.parse("min" if budget_bytes is None else budget_bytes)
        try:
            plan = self._plan_form(step.trace, budget, self.next_strategy(), start)
        except (InfeasibleBudget, SolverTimeout) as error:
            self.log.add(str(step), error)
            raise
        self.log.add(str(step), plan)
        return plan
