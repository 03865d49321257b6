"""A sweep over budgets in which tensors may be offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from remat.choice.offload import solve_with_offload
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.split import CHOICE_LIMIT_S
from remat.choice.trace_plan import TracePlan
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel, is_cancelled
from remat.simulate import baseline_of


def sweep_with_offload(
    trace: Trace,
    budgets: Iterable[Budget],
    limits: OffloadLimits,
    plans_without: Sequence[Plan],
    *,
    solve_in_full: Callable[[Trace, Budget], Plan],
    on_plan: Callable[[], None],
    cancel: Cancel | None = None,
) -> list[Plan]:
    """Return the fastest plan for each budget, smallest budget first; each may offload or not.

    `plans_without` are those of a sweep that offloads nothing. They are returned for "min", whose
    search for a smaller peak would take minutes, and for the budgets that are left once `cancel` is
    set. Budgets below the first that is infeasible are left out. `on_plan` is called after each
    plan.
    """
    graph = trace.graph()
    baseline_bytes = baseline_of(graph).peak_bytes
    sizes = {budget.in_bytes(baseline_bytes, graph.library_bytes) for budget in budgets}
    by_budget = {plan.budget_bytes: plan for plan in plans_without}
    plans = dict(by_budget)

    def solve_without(size_bytes: int) -> TracePlan:
        if size_bytes not in by_budget:
            raise SolverTimeout("the sweep without offloading has no plan for this budget")
        return TracePlan(trace, by_budget[size_bytes])

    for size_bytes in sorted((size for size in sizes if size is not None), reverse=True):
        try:
            chosen = solve_with_offload(
                (trace,),
                Budget.parse(size_bytes),
                limits,
                solve_in_full=solve_in_full,
                solve_without=lambda size_bytes=size_bytes: solve_without(size_bytes),
                cancel=cancel,
                limit_s=CHOICE_LIMIT_S,
            )
        except RematError as error:
            if is_cancelled(cancel) or isinstance(error, InfeasibleBudget | SolverTimeout):
                break
            raise
        plans[size_bytes] = chosen.plan
        on_plan()
        if is_cancelled(cancel):
            break
    return [plans[size_bytes] for size_bytes in sorted(plans)]
