"""`PlanSession`: the plans of one compiled graph, until Inductor's kernels fit the budget.

Inductor decides what it generates after a graph is planned, and reports it by an exception. So the
backend compiles, reports the exception to the session, and compiles once more with the next plan:

    while True:
        partitioner = session.next_partitioner()
        try:
            return compile(graph, partitioner)
        except Exception as error:
            if not session.has_next_plan(error):
                raise
"""

from __future__ import annotations

import logging

from remat.choice.candidate_log import CandidateLog
from remat.errors import InfeasibleBudget, one_line
from remat.frontend.compile.candidates import least_demanding_error
from remat.frontend.compile.compat import cause_of_type, without_frames
from remat.frontend.compile.compile_options import COMPILED_PIECES, CompileOptions
from remat.frontend.compile.inductor.copy_operators import CopiesOutOfOrder
from remat.frontend.compile.inductor.peak_check import PeakOverBudget
from remat.frontend.compile.partitioner import Partitioner, PlanRound
from remat.frontend.compile.registry import NO_FEEDBACK, PlannedSplit, ReplanFeedback
from remat.frontend.compile.split import CannotSplit
from remat.frontend.compile.step_graphs import StepGraphs
from remat.limits.options import PIECES, pieces_to_try
from remat.limits.units import format_bytes
from remat.report.plan_report import describe_peak

logger = logging.getLogger("remat")

_MAX_ROUNDS = 3
"""Plans of one graph before its budget counts as infeasible."""


class PlanSession:
    """The plans of one graph. A plan that fails is followed by

    1. a plan with the feedback of its kernels, if they exceed the budget: up to `_MAX_ROUNDS`
       plans, of which the last keeps the kernels that Inductor generates without a plan;
    2. plans without offloading, if kernels do not take the plans with offloaded tensors;
    3. plans with the largest operations in pieces, if no plan fits and `split` is "auto".

    `feedback` and `split` are what an earlier process found for this graph.
    """

    def __init__(
        self,
        options: CompileOptions,
        step: StepGraphs,
        feedback: ReplanFeedback = NO_FEEDBACK,
        split: PlannedSplit | None = None,
    ) -> None:
        self._options = options
        self._first_feedback = feedback
        pieces = pieces_to_try(options.split)
        self._more_pieces = iter(COMPILED_PIECES if pieces == PIECES and split is None else ())
        if split is None and len(pieces) == 1:
            split = PlannedSplit(pieces[0])
        self._errors: list[InfeasibleBudget] = []
        """The errors of the plans with fewer pieces."""
        self._partitioner: Partitioner | None = None
        self._log = CandidateLog()
        self._round = PlanRound(step, unbounded=[], log=self._log)
        self._start_plan_rounds(feedback, split)

    def _start_plan_rounds(self, feedback: ReplanFeedback, split: PlannedSplit | None) -> None:
        """Count the plans from 1 again, with this feedback and split."""
        self._round = self._round._replace(feedback=feedback, split=split, number=1)
        self._exceeded: PeakOverBudget | None = None
        self._offloading_title = ""
        """The title of the graph, if one of these rounds planned offloaded tensors."""

    def next_partitioner(self) -> Partitioner:
        """Return the partitioner for the next plan."""
        self._partitioner = Partitioner.of_backend(self._options, self._round)
        return self._partitioner

    def has_next_plan(self, error: Exception) -> bool:
        """Select the next plan after this error of the latest one, and return True. Return False if
        the error is not about the budget. Raises `InfeasibleBudget` if no plan is left."""
        assert self._partitioner is not None
        partitioner, compiled = self._partitioner, self._partitioner.compiled
        if compiled is not None and compiled.offloads and not self._offloading_title:
            self._offloading_title = compiled.title
        partitioner.discard_plan()
        infeasible = cause_of_type(error, InfeasibleBudget)
        exceeded = cause_of_type(error, PeakOverBudget)
        if exceeded is not None:
            self._log.refuse(exceeded.compiled.plan, exceeded.summary)
        if infeasible is not None and self._exceeded is not None:  # the reduced budget
            infeasible = self._infeasible_after_rounds(self._exceeded)
        elif exceeded is not None:
            self._exceeded = without_frames(exceeded)
            logger.info("%s: replanning, as %s", exceeded.compiled.title, exceeded.summary)
            if self._round.number < _MAX_ROUNDS:
                feedback = self._round.feedback
                if partitioner.split is None or self._round.split is not None:
                    feedback = _with_kernel_feedback(feedback, exceeded)
                # Else "min" selected pieces: the next round plans the graph without them.
                number = self._round.number + 1
                self._round = self._round._replace(feedback=feedback, number=number)
                return True
            infeasible = self._infeasible_after_rounds(exceeded)
        reason = cause_of_type(error, CopiesOutOfOrder) or infeasible
        if reason is not None and self._offloading_title:
            logger.info(
                "%s: planning without offloading, as %s", self._offloading_title, one_line(reason)
            )
            self._start_plan_rounds(NO_FEEDBACK._replace(without_offload=True), self._round.split)
            return True
        return self._has_plan_in_more_pieces(error, infeasible)

    def _has_plan_in_more_pieces(
        self, error: Exception, infeasible: InfeasibleBudget | None
    ) -> bool:
        """Select a plan with more pieces, and return True. Return False if `error` is not about the
        budget (`infeasible` is None). Raises `InfeasibleBudget` if there are no more pieces to try,
        or the graph cannot be split."""
        assert self._partitioner is not None
        if infeasible is not None:
            self._errors.append(without_frames(infeasible))
        elif self._errors and (reason := cause_of_type(error, CannotSplit)):
            hint = f"Its largest operations are not split: {reason}"
            self._errors = [error.with_hint(hint) for error in self._errors]
        else:
            return False
        number = None if infeasible is None else next(self._more_pieces, None)
        if number is None:
            raise least_demanding_error(self._errors) from None
        split = PlannedSplit(number, self._partitioner.unsplit, self._errors[0].min_feasible_bytes)
        logger.info(
            "%s: no plan fits the budget; splitting the largest operations into %d pieces",
            self._partitioner.title,
            number,
        )
        self._start_plan_rounds(self._first_feedback, split)
        return True

    def _infeasible_after_rounds(self, exceeded: PeakOverBudget) -> InfeasibleBudget:
        """Return the error for a graph whose kernels exceeded the budget in each of its plans."""
        compiled, limits = exceeded.compiled, self._options.limits
        external_bytes = compiled.external_bytes + limits.reserve_bytes
        peak_bytes = (compiled.verified_bytes or 0) + external_bytes
        external = f", of which {format_bytes(external_bytes)} are used outside this graph"
        largest = describe_peak(compiled.plan.graph, compiled.plan.schedule)
        return InfeasibleBudget(
            f"{compiled.title}: Inductor's kernels exceed the budget {limits.budget.requested!r} "
            f"after {compiled.rounds} plans. Pass a budget of at least {peak_bytes:,} bytes"
            f"{external if external_bytes else ''}. As planned, {largest}.",
            min_feasible_bytes=peak_bytes,
        )


def _with_kernel_feedback(feedback: ReplanFeedback, exceeded: PeakOverBudget) -> ReplanFeedback:
    """Return the feedback for the next plan, after Inductor's kernels exceeded the limit.

    Inductor's own kernels are no candidate once they exceed the budget. For other kernels, first
    disable in-place reuse where Inductor did not apply it: this changes which schedules need more
    memory. Then lower the budget by 17/16 of the excess; the margin is for the kernels of the next
    plan, which differ again.
    """
    if exceeded.compiled.is_plain:
        return feedback._replace(plain_exceeds=True)
    if not exceeded.separate_buffers <= feedback.separate_buffers:
        separate_buffers = feedback.separate_buffers | exceeded.separate_buffers
        return feedback._replace(separate_buffers=separate_buffers)
    excess_bytes = feedback.excess_bytes + exceeded.excess_bytes * 17 // 16
    return feedback._replace(excess_bytes=excess_bytes)
