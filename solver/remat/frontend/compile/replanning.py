"""A graph whose kernels exceed the budget: the feedback for its next plan, and the final error."""

from __future__ import annotations

from remat.errors import InfeasibleBudget
from remat.frontend.compile.compile_options import CompileOptions
from remat.frontend.compile.inductor.peak_check import PeakOverBudget
from remat.frontend.compile.registry import ReplanFeedback
from remat.limits.units import format_bytes
from remat.report.describe import describe_peak


def add_feedback(feedback: ReplanFeedback, exceeded: PeakOverBudget) -> ReplanFeedback:
    """Return the feedback for the next plan.

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


def infeasible_after_rounds(
    exceeded: PeakOverBudget, rounds: int, options: CompileOptions
) -> InfeasibleBudget:
    """Return the error for a graph whose kernels exceeded the budget in each of its plans."""
    compiled = exceeded.compiled
    external_bytes = compiled.external_bytes + options.limits.reserve_bytes
    peak_bytes = (compiled.verified_bytes or 0) + external_bytes
    external = f", of which {format_bytes(external_bytes)} are used outside this graph"
    largest = describe_peak(compiled.plan.graph, compiled.plan.schedule)
    return InfeasibleBudget(
        f"{compiled.title}: Inductor's kernels exceed the budget "
        f"{options.limits.budget.requested!r} after {rounds} plans. Pass a budget of at least "
        f"{peak_bytes:,} bytes{external if external_bytes else ''}. As planned, {largest}.",
        min_feasible_bytes=peak_bytes,
    )
