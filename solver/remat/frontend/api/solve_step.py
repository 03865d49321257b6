"""`solve_step`: the plan of a trace whose operations may be split and tensors offloaded."""

from __future__ import annotations

from collections.abc import Callable

from remat.choice.trace_plan import TracePlan
from remat.costs.devices import Link
from remat.costs.trace_costs import roofline_of
from remat.documents.trace import Trace
from remat.errors import wrong_type
from remat.frontend.api.optimize import optimize_options
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.planning.solving import solve_trace
from remat.limits.budget import Budget
from remat.limits.infeasible import INFEASIBLE_ERROR, plan_or_smallest
from remat.limits.options import OFFLOAD_OFF, SPLIT_OFF
from remat.progress import Progress
from remat.strategies import Strategy


def solve_step(
    trace: Trace,
    budget: int | str,
    strategy: Strategy | None = None,
    *,
    split: str | int = SPLIT_OFF,
    offload: str = OFFLOAD_OFF,
    host_budget: int | str | None = None,
    link: Link | None = None,
    cache: str | CostCache | None = None,
    progress: Callable[[Progress], None] | None = None,
    infeasible: str = INFEASIBLE_ERROR,
) -> TracePlan:
    """Return the fastest plan of a measured trace within `budget`, and the trace that it is for.

    `remat.solve` decides what is recomputed. This function may also run operations in pieces
    (`split`) and copy tensors to the host (`offload`), as `remat.optimize` does, with the same
    options. Both change the trace, so the result is a pair:

        step = remat.solve_step(trace, "50%", split="auto", offload="auto")
        program = remat.rewrite(step.trace, step.plan.schedule)

    The costs of pieces, and the bandwidth of copies, come from where the costs of the trace came
    from: a data sheet, or this machine. Raises the errors of `remat.solve`, and `BudgetError` for
    a `host_budget` above what is free.
    """
    if not isinstance(trace, Trace):
        remedy = "pass remat.measure(remat.trace(model, inputs)); remat.solve takes a Graph"
        raise wrong_type("solve_step", "a Trace", trace, remedy)
    trace.graph()  # raises for a trace without costs
    options = optimize_options(
        budget,
        strategy=strategy,
        costs=None if (split, offload) == (SPLIT_OFF, OFFLOAD_OFF) else roofline_of(trace),
        cache=cache,
        progress=progress,
        split=split,
        offload=offload,
        host_budget=host_budget,
        link=link,
    )
    result = plan_or_smallest(
        lambda budget: solve_trace(options, trace, budget),
        Budget.parse(budget),
        infeasible,
        peak_bytes=lambda result: result.plan.peak_bytes,
    )
    return TracePlan(result.trace, result.plan)
