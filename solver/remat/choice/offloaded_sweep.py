"""Plans with offloading for several budgets, next to those of a sweep without."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remat.choice.offload import solve_with_offload
from remat.choice.offloaded_traces import OffloadLimits
from remat.choice.split import CHOICE_LIMIT_S
from remat.choice.trace_plan import TracePlan
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel
from remat.simulate import baseline_of


def sweep_with_offload(
    trace: Trace,
    budgets: Iterable[Budget],
    limits: OffloadLimits,
    without: Iterable[Plan],
    *,
    solve_in_full: Callable[[Trace, Budget], Plan],
    on_plan: Callable[[Plan], None],
    cancel: Cancel | None = None,
) -> list[Plan]:
    """Return the fastest plan for each budget, smallest budget first, with tensors offloaded or
    not; `without` are the plans that offload nothing.

    Budgets below the first that is infeasible are left out, and so is "min". `on_plan` is called
    with each plan. Once `cancel` is set, the remaining budgets are omitted.
    """
    graph = trace.graph()
    baseline_bytes = baseline_of(graph).peak_bytes
    sizes = {budget.in_bytes(baseline_bytes, graph.library_bytes) for budget in budgets}
    solved = {plan.budget_bytes: plan for plan in without}
    plans: list[Plan] = []
    for size_bytes in sorted((size for size in sizes if size is not None), reverse=True):
        if cancel is not None and cancel.is_set():
            break
        budget = Budget.parse(size_bytes)

        def solve_without(size_bytes: int = size_bytes, budget: Budget = budget) -> TracePlan:
            plan = solved.get(size_bytes)
            return TracePlan(trace, solve_in_full(trace, budget) if plan is None else plan)

        try:
            chosen = solve_with_offload(
                (trace,),
                budget,
                limits,
                solve_in_full=solve_in_full,
                solve_without=solve_without,
                cancel=cancel,
                limit_s=CHOICE_LIMIT_S,
            )
        except (InfeasibleBudget, SolverTimeout):
            break
        plans.append(chosen.plan)
        on_plan(chosen.plan)
    return plans[::-1]
