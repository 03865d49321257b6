"""The candidates for a step without offloading, and the choice among them.

A candidate is a form of the step that computes the same, such as the step with its largest
operations in pieces. Sources propose candidates. Each is judged by a schedule that takes a fraction
of a second (the relaxation and eviction), and only the best is solved in full. To add a kind of
candidate, write a source and put it into `SOURCES`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from remat.allocator.prediction import with_prediction
from remat.choice.offloadable_step import StepPlan, TraceStep
from remat.choice.plan_request import PlanRequest, TraceSolver
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.options import PIECES
from remat.passes.split.obstacle import split_obstacle
from remat.passes.split.splits import split_largest_operations
from remat.plan import Plan
from remat.plan_data import SplitFigures
from remat.solve import solve
from remat.strategies.auto import Auto
from remat.strategies.base import within_clock

_ESTIMATE = Auto(gap=0.99, peak_gap=0.99, time_limit=5.0)
"""The strategy of estimates: it ends with the first schedule that fits."""

_LEAST_GAIN = 0.005
"""The share of the step's time that a candidate must save over the step as it is."""

_LEAST_GAIN_OF_PIECES = 0.001
"""The share of the step's time that more pieces must save over fewer."""

_LEAST_PEAK_GAIN = 0.01
"""For the budget "min": the share of the peak that a candidate must save."""


@dataclass(frozen=True)
class Candidate:
    """A form of a step with the result of a quick solve: a plan, or None if it found no schedule,
    and then the smallest peak if that is known."""

    step: TraceStep
    plan: Plan | None
    min_feasible_bytes: int | None = None

    @property
    def score(self) -> float:
        """The mean of the quick schedule's extra time and its bound, as shares: the best schedule
        is between them. Without a bound, the extra time. There must be a plan."""
        assert self.plan is not None
        bound = self.plan.lower_bound
        return self.plan.overhead if bound is None else (self.plan.overhead + bound) / 2

    def is_better_than(self, other: Candidate, is_min: bool, least_gain: float) -> bool:
        """True if this candidate promises a better plan: one that saves more than `least_gain`, a
        share of the time; if `is_min`, first one with a smaller peak. A plan is better than none;
        of two candidates without, the one with the smaller peak found is better."""
        if self.plan is None or other.plan is None:
            return self.plan is not None or (other.plan is None and self._is_nearer_than(other))
        if is_min:
            smaller_bytes = (1 - _LEAST_PEAK_GAIN) * other.plan.peak_bytes
            if self.plan.peak_bytes < smaller_bytes:
                return True
            if self.plan.peak_bytes > other.plan.peak_bytes:
                return False
        return self.score < other.score - least_gain

    def is_slower_than(self, other: Candidate) -> bool:
        """True if the bound of this candidate's time is above the time of the other's schedule."""
        if self.plan is None or other.plan is None:
            return False
        return (self.plan.lower_bound or 0.0) > other.plan.overhead

    def _is_nearer_than(self, other: Candidate) -> bool:
        """True if this candidate has a smaller peak than the other, as found by their quick solves,
        or if one of the two is unknown because its solve took too long."""
        sizes = self.min_feasible_bytes, other.min_feasible_bytes
        return None in sizes or sizes[0] < sizes[1]  # type: ignore[operator]  # both are int


class CandidateSearch:
    """The search for the best candidate for a step: what a source needs to propose one.

    `step` is the step as it is, and `request` what its plan may do. `measure` adds costs to the
    operations of a trace that have none. The search ends with `clock`. `is_min` is True for the
    smallest peak.
    """

    def __init__(self, step: TraceStep, request: PlanRequest, solver: TraceSolver) -> None:
        self.step = step
        self.request = request
        self.measure = solver.measure
        self.is_min = solver.budget_bytes is None
        self.clock = solver.clock.limited_to(solver.choice_limit_s)
        self.most_split = step.trace
        """The step in the most pieces that were tried."""
        self.quick_plan: Plan | None = None
        """The plan of a quick solve of the step as it is, once there is one."""
        self._solver = solver

    def obstacle(self) -> str:
        """Return what stays whole in all candidates, and why, as a sentence; "" if nothing does."""
        return split_obstacle(self.step.trace, self.most_split)

    @cached_property
    def as_it_is(self) -> Candidate:
        """The step as it is, judged when this is read first: never where no source proposes a
        candidate."""
        candidate = self.judged(self.step)
        self.quick_plan = candidate.plan
        return candidate

    def judged(self, step: TraceStep) -> Candidate:
        """Return a form of the step as a candidate: with the plan of a quick solve, or None without
        one."""
        budget_bytes = self._solver.budget_bytes
        budget = "min" if budget_bytes is None else budget_bytes
        strategy = within_clock(_ESTIMATE, self.clock)
        plan, smallest_bytes, log = None, None, self._solver.log
        try:
            cancel = self._solver.clock.without_limit()
            plan = solve(step.graph(), budget, strategy, cancel=cancel)
            log.add(str(step), plan, is_estimate=True)
        except InfeasibleBudget as error:
            smallest_bytes = error.min_feasible_bytes
            log.add(str(step), error, is_estimate=True)
        except SolverTimeout as error:
            log.add(str(step), error, is_estimate=True)
        return Candidate(step, plan, smallest_bytes)

    def best(self) -> Candidate | None:
        """Return the best candidate; None if no source proposes one that is better than the step as
        it is. A source ends with the first candidate that is worse than the best one so far, and
        the search with its clock."""
        best: Candidate | None = None
        for source in SOURCES:
            if self.clock.is_set():
                break
            for candidate in source(self):
                if self._is_better(candidate, best):
                    best = candidate
                elif best is not None:
                    break
                if self.clock.is_set():
                    break
        return best

    def _is_better(self, candidate: Candidate, best: Candidate | None) -> bool:
        """True if a candidate is better than the best one so far or, if that is None, than the step
        as it is."""
        if best is None:
            return self.as_it_is.plan is None or candidate.is_better_than(
                self.as_it_is, self.is_min, _LEAST_GAIN
            )
        # Of two numbers of pieces that are as good, the smaller one.
        has_fewer = candidate.step.pieces <= best.step.pieces
        gain = -_LEAST_GAIN_OF_PIECES if has_fewer else _LEAST_GAIN_OF_PIECES
        return candidate.is_better_than(best, self.is_min, gain)


# -- where candidates come from --------------------------------------------------------------------

CandidateSource = Callable[[CandidateSearch], Iterator[Candidate]]
"""Proposes candidates for a step, the most promising first; none where the request does not allow
its kind."""

_MAX_ROUNDS = 4
"""The maximum number of times that the largest operations are split to reach a budget."""

_LARGE_OVERHEAD = 0.1
"""The extra time of the unsplit step, as a share, above which the most pieces are tried first."""

MAX_PIECE_NODES = 16_000
"""The most trace nodes (operations and views) that the pieces of a region may have together. A
larger region spans most of a deep network, and splitting it amounts to smaller batches."""


def in_pieces(search: CandidateSearch) -> Iterator[Candidate]:
    """Propose the step with its largest operations in each number of pieces of the request: 2, 4, 8
    and 16 with "auto".

    Numbers are in increasing order, up to the first that is proved to be slower than the unsplit
    step: more pieces cost more time. If the unsplit step does not fit or has more than 10% of extra
    time, they are in decreasing order; after the first number that is slower, the others follow in
    increasing order. For "min", the largest number that can be split is the only one: fewer pieces
    have a larger peak. With "auto", nothing is proposed if the unsplit step fits without extra
    time.
    """
    pieces = search.request.pieces
    if not pieces or search.clock.is_set():
        return
    unsplit = search.as_it_is.plan
    if unsplit is not None and unsplit.overhead <= 0 and pieces == PIECES:
        return
    is_decreasing = search.is_min or unsplit is None or unsplit.overhead > _LARGE_OVERHEAD
    numbers = deque(pieces)
    while numbers:
        number = numbers.pop() if is_decreasing else numbers.popleft()
        if (candidate := _candidate_in_pieces(search, number, MAX_PIECE_NODES)) is not None:
            yield candidate
            is_slower = candidate.is_slower_than(search.as_it_is)
            if search.is_min or (is_slower and not is_decreasing):
                return
            is_decreasing = is_decreasing and not is_slower
        elif search.clock.is_set():
            return


def requested_pieces(search: CandidateSearch) -> Candidate | None:
    """Return the step with its largest operations in the number of pieces of the request, which
    must have exactly one; None if they cannot be split."""
    (number,) = search.request.pieces
    return _candidate_in_pieces(search, number, math.inf)


def _candidate_in_pieces(
    search: CandidateSearch, pieces: int, max_piece_nodes: float
) -> Candidate | None:
    """Return the step with its largest operations in so many pieces. Split them, then repeat with
    those that are the largest now, until a schedule fits; for "min", while the smallest peak falls.
    None if the first cannot be split. `max_piece_nodes` limits the trace nodes of the pieces of a
    region."""
    best = None
    for split in split_rounds(search.step.trace, pieces, search.measure, max_piece_nodes):
        candidate = search.judged(TraceStep(split))
        if candidate.step.pieces >= TraceStep(search.most_split).pieces:
            search.most_split = split
        if best is not None and search.is_min and not candidate.is_better_than(best, True, 1.0):
            break
        best = candidate
        if search.clock.is_set() or (best.plan is not None and not search.is_min):
            break
    return best


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


SOURCES: list[CandidateSource] = [in_pieces]
"""The sources of candidates, in the order in which they are asked."""


# -- the plan of the best candidate ----------------------------------------------------------------


def plan_best_candidate(
    step: TraceStep, request: PlanRequest, solver: TraceSolver
) -> StepPlan[TraceStep]:
    """Return the plan of a measured step or of a candidate, whichever is faster.

    With one number of `request.pieces`, the largest operations are split if they can be. The
    statistics of the plan of a split step have the bound of the unsplit step's time, or the
    smallest peak found for it. Where the plan has extra time and the largest operation cannot be
    split, it says why. Raises the errors of `solver`.
    """
    search = CandidateSearch(step, request, solver)
    try:
        chosen = _plan_of_best_candidate(search, solver)
    except InfeasibleBudget as error:
        if request.pieces and (obstacle := search.obstacle()):
            raise error.with_hint(obstacle) from None
        raise
    plan = chosen.plan
    if request.pieces and plan.overhead > 0 and (obstacle := search.obstacle()):
        plan = replace(plan, declined=replace(plan.declined, not_split=obstacle))
    return chosen._replace(plan=plan)


def _plan_of_best_candidate(search: CandidateSearch, solver: TraceSolver) -> StepPlan[TraceStep]:
    """Return the full plan of the best candidate, or of the step as it is where that is better or
    there is no candidate. If the request has one number of pieces, the split step is not
    compared."""
    step, is_min = search.step, search.is_min
    is_requested = len(search.request.pieces) == 1

    def plan_of(form: TraceStep, quick: Plan | None) -> StepPlan[TraceStep]:
        """Return the full plan of a form of the step, solved from the schedule of `quick`. For
        "min", return `quick` if the full plan's peak is over 1% larger: a planning service takes no
        start."""
        plan = solver.solve(form, solver.budget_bytes, None if quick is None else quick.schedule)
        if is_min and quick is not None:
            max_peak_bytes = (1 + _LEAST_PEAK_GAIN) * quick.peak_bytes
            if plan.peak_bytes > max_peak_bytes:
                solver.log.replace_plan(plan, quick)
                plan = with_prediction(quick, form.trace)
        return StepPlan(form, plan)

    def plan_as_it_is() -> StepPlan[TraceStep]:
        return plan_of(step, search.quick_plan)

    if is_requested:
        _ = search.as_it_is  # for the figures, before pieces take the time
        best = requested_pieces(search)
    else:
        best = search.best()
    if best is None:
        return plan_as_it_is()
    as_it_is = search.as_it_is
    try:
        chosen = plan_of(best.step, best.plan)
    except (InfeasibleBudget, SolverTimeout):
        if as_it_is.plan is None or is_requested:
            raise
        return plan_as_it_is()
    unchanged_plan = as_it_is.plan
    if not is_requested and _may_beat_candidate(as_it_is, chosen.plan, is_min):
        unchanged = plan_as_it_is()
        if not _saves_over_unchanged(chosen.plan, unchanged.plan, is_min):
            return unchanged
        unchanged_plan = unchanged.plan
    if chosen.step.pieces > step.pieces:
        figures = _split_figures(as_it_is, unchanged_plan, is_min)
        chosen = chosen._replace(plan=replace(chosen.plan, split=figures))
    return chosen


def _may_beat_candidate(as_it_is: Candidate, plan: Plan, is_min: bool) -> bool:
    """True if the step as it is may have a better plan than `plan` of a candidate, by its bound or,
    for "min", by the peak of its quick solve; False if that found no plan."""
    if as_it_is.plan is None:
        return False
    if is_min:
        return as_it_is.plan.peak_bytes * (1 - _LEAST_PEAK_GAIN) <= plan.peak_bytes
    return (as_it_is.plan.lower_bound or 0.0) < plan.overhead


def _saves_over_unchanged(plan: Plan, unchanged: Plan, is_min: bool) -> bool:
    """True if the plan of a candidate saves enough time over the plan of the step as it is; for
    "min", enough memory."""
    if is_min:
        return plan.peak_bytes < (1 - _LEAST_PEAK_GAIN) * unchanged.peak_bytes
    return plan.overhead <= unchanged.overhead - _LEAST_GAIN


def _split_figures(unsplit: Candidate, unsplit_plan: Plan | None, is_min: bool) -> SplitFigures:
    """Return the bound of the unsplit step's time, None without a plan of it, and its smallest peak
    found, None where it fits a budget in bytes."""
    bound = None if unsplit_plan is None else unsplit_plan.lower_bound
    smallest = unsplit.min_feasible_bytes if unsplit.plan is None else unsplit.plan.peak_bytes
    has_smallest = unsplit.plan is None or is_min
    return SplitFigures(bound, smallest if has_smallest else None)
