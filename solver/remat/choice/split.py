"""The choice of what to split, and into how many pieces, for a step and a budget.

The operations that need the most memory are split into 2, 4, 8 or 16 pieces. Each number is judged
by a schedule that takes a fraction of a second (the relaxation and eviction), and only the best is
solved in full.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from remat.allocator.prediction import with_prediction
from remat.choice.offloadable_step import StepPlan, TraceStep
from remat.choice.plan_request import TraceSolver
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.options import PIECES
from remat.passes.split.splits import split_largest_operations
from remat.plan import Plan
from remat.plan_data import SplitFigures
from remat.progress import Clock
from remat.solve import solve
from remat.strategies.auto import Auto
from remat.strategies.base import within_clock

logger = logging.getLogger("remat")

_ESTIMATE = Auto(gap=0.99, peak_gap=0.99, time_limit=5.0)
"""The strategy of estimates: it ends with the first schedule that fits."""

_MAX_ROUNDS = 4
"""The maximum number of times that the largest operations are split to reach a budget."""

_LEAST_GAIN = 0.005
"""The share of the step's time that splitting must save, at least."""

_LEAST_GAIN_OF_PIECES = 0.001
"""The share of the step's time that more pieces must save over fewer."""

_LARGE_OVERHEAD = 0.1
"""The extra time of the unsplit step, as a share, above which the most pieces are tried first."""

MAX_PIECE_NODES = 16_000
"""The most trace nodes (operations and views) that the pieces of a region may have together. A
larger region spans most of a deep network, and splitting it amounts to smaller batches."""

_LEAST_PEAK_GAIN = 0.01
"""For the budget "min": the share of the peak that splitting must save."""


def split_rounds(
    trace: Trace,
    pieces: int,
    measure: Callable[[Trace], Trace],
    max_piece_nodes: float = MAX_PIECE_NODES,
) -> Iterator[Trace]:
    """Yield the measured trace with its largest operations split, then with the operations split
    that are the largest now, and so on: up to `_MAX_ROUNDS` times, or until none can be split."""
    for _ in range(_MAX_ROUNDS):
        smaller = split_largest_operations(trace, pieces, max_piece_nodes)
        if smaller is trace:
            return
        trace = measure(smaller)
        yield trace


@dataclass(frozen=True)
class _Estimate:
    """The result of a quick solve of a trace. `plan` is None if it did not find a schedule."""

    trace: Trace
    plan: Plan | None
    min_feasible_bytes: int | None = None

    @property
    def score(self) -> float:
        """The mean of the quick schedule's time and its bound, as shares of extra time: the best
        schedule is between them."""
        assert self.plan is not None
        bound = self.plan.lower_bound
        return self.plan.overhead if bound is None else (self.plan.overhead + bound) / 2

    def is_better_than(self, other: _Estimate, is_min: bool, least_gain: float) -> bool:
        """True if this trace promises a better plan by at least the gain, a share of the time."""
        if self.plan is None or other.plan is None:
            return self.plan is not None or (other.plan is None and self._is_nearer_than(other))
        if is_min:
            smaller_bytes = (1 - _LEAST_PEAK_GAIN) * other.plan.peak_bytes
            if self.plan.peak_bytes < smaller_bytes:
                return True
            if self.plan.peak_bytes > other.plan.peak_bytes:
                return False
        return self.score < other.score - least_gain

    def _is_nearer_than(self, other: _Estimate) -> bool:
        """True if the smallest peak found is below that of another trace, or if one of the two is
        not known because the quick solve took too long."""
        sizes = self.min_feasible_bytes, other.min_feasible_bytes
        return None in sizes or sizes[0] < sizes[1]  # type: ignore[operator]  # both are int


def choose_pieces(
    step: TraceStep, pieces: tuple[int, ...], solver: TraceSolver
) -> StepPlan[TraceStep]:
    """Return the plan of a measured step, or of it with operations split where that is faster.

    With one number of `pieces`, the largest operations are split if they can be. Statistics of the
    plan of a split step have the bound of the unsplit step's time, or the smallest peak found for
    it. Raises the errors of `solver`.
    """

    def plan_of(estimate: _Estimate) -> StepPlan[TraceStep]:
        """Return the full plan of an estimated trace or, if there is no time left to reach as small
        a peak, the estimate's."""
        form, quick = TraceStep(estimate.trace), estimate.plan
        plan = solver.solve(form, solver.budget_bytes)
        if is_min and quick is not None and plan.peak_bytes > quick.peak_bytes:
            plan = with_prediction(quick, form.trace)
        return StepPlan(form, plan)

    is_min = solver.budget_bytes is None
    search = _Search(solver, solver.clock.limited_to(solver.choice_limit_s))
    unsplit = search.estimate(step.trace)
    if unsplit.plan is not None and unsplit.plan.overhead <= 0 and pieces == PIECES:
        return plan_of(unsplit)
    best = search.best_split(step.trace, unsplit, pieces)
    if best is unsplit:
        return plan_of(unsplit)
    try:
        split = plan_of(best)
    except (InfeasibleBudget, SolverTimeout):
        if unsplit.plan is None or len(pieces) == 1:
            raise
        return plan_of(unsplit)
    unsplit_plan = unsplit.plan
    if len(pieces) > 1 and _may_be_better(unsplit, split.plan, is_min):
        without = plan_of(unsplit)
        if not _is_better(split.plan, without.plan, is_min):
            return without
        unsplit_plan = without.plan
    plan = _with_split_figures(split.plan, unsplit, unsplit_plan, is_min)
    return split._replace(plan=plan)


@dataclass(frozen=True)
class _Search:
    """A search for the number of pieces, and its time limit."""

    solver: TraceSolver
    clock: Clock

    @property
    def is_min(self) -> bool:
        """True for the smallest peak."""
        return self.solver.budget_bytes is None

    def best_split(self, trace: Trace, unsplit: _Estimate, pieces: tuple[int, ...]) -> _Estimate:
        """Return the estimate of the best number of pieces, or `unsplit` if none is better.

        Numbers are tried in increasing order; in decreasing order for "min", or if the unsplit step
        does not fit or has more than 10% of extra time. The search ends at the first number that is
        worse than the best one so far, the unsplit step apart.
        """
        if len(pieces) == 1:
            return self.split_until_feasible(trace, pieces[0], math.inf) or unsplit
        overhead = math.inf if unsplit.plan is None else unsplit.plan.overhead
        is_descending = self.is_min or overhead > _LARGE_OVERHEAD
        best = unsplit
        for number in reversed(pieces) if is_descending else pieces:
            if self.clock.is_set():
                break
            candidate = self.split_until_feasible(trace, number, MAX_PIECE_NODES)
            if candidate is None:
                continue
            if best is unsplit:
                is_better = unsplit.plan is None or candidate.is_better_than(
                    unsplit, self.is_min, _LEAST_GAIN
                )
            else:  # of two numbers that are as good, the smaller one
                gain = -_LEAST_GAIN_OF_PIECES if is_descending else _LEAST_GAIN_OF_PIECES
                is_better = candidate.is_better_than(best, self.is_min, gain)
            if is_better:
                best = candidate
            elif best is not unsplit:
                break
            if self.is_min:  # fewer pieces have a larger peak
                break
        return best

    def split_until_feasible(
        self, trace: Trace, pieces: int, max_piece_nodes: float
    ) -> _Estimate | None:
        """Split the largest operations, then repeat with those that are the largest now, until a
        schedule fits; for "min", while the smallest peak falls. None if the first cannot be split.
        """
        best = None
        for split in split_rounds(trace, pieces, self.solver.measure, max_piece_nodes):
            estimate = self.estimate(split)
            if best is not None and self.is_min and not estimate.is_better_than(best, True, 1.0):
                break
            best = estimate
            if self.clock.is_set() or (best.plan is not None and not self.is_min):
                break
        return best

    def estimate(self, trace: Trace) -> _Estimate:
        """Return the result of a quick solve of a trace."""
        budget_bytes = self.solver.budget_bytes
        budget = "min" if budget_bytes is None else budget_bytes
        strategy, cancel = within_clock(_ESTIMATE, self.clock), self.solver.clock.without_limit()
        plan, smallest_bytes = None, None
        try:
            plan = solve(trace.graph(), budget, strategy, cancel=cancel)
        except InfeasibleBudget as error:
            smallest_bytes = error.min_feasible_bytes
        except SolverTimeout:
            pass
        logger.debug("estimate %s: %r", TraceStep(trace), plan)
        return _Estimate(trace, plan, smallest_bytes)


def _may_be_better(unsplit: _Estimate, split_plan: Plan, is_min: bool) -> bool:
    """True if nothing proves that the unsplit step has no better plan."""
    if unsplit.plan is None:
        return False
    if is_min:
        return unsplit.plan.peak_bytes * (1 - _LEAST_PEAK_GAIN) <= split_plan.peak_bytes
    return (unsplit.plan.lower_bound or 0.0) < split_plan.overhead


def _is_better(split_plan: Plan, unsplit_plan: Plan, is_min: bool) -> bool:
    """True if splitting saves time; for "min", memory."""
    if is_min:
        return split_plan.peak_bytes < (1 - _LEAST_PEAK_GAIN) * unsplit_plan.peak_bytes
    return split_plan.overhead <= unsplit_plan.overhead - _LEAST_GAIN


def _with_split_figures(
    plan: Plan, unsplit: _Estimate, unsplit_plan: Plan | None, is_min: bool
) -> Plan:
    """Return the plan with the bound of the unsplit step's time, or its smallest peak found."""
    bound = None if unsplit_plan is None else unsplit_plan.lower_bound
    smallest = unsplit.min_feasible_bytes if unsplit.plan is None else unsplit.plan.peak_bytes
    has_smallest = unsplit.plan is None or is_min
    return replace(plan, split=SplitFigures(bound, smallest if has_smallest else None))
