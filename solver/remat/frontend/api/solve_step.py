"""`solve_step`: the plan of a trace whose operations may be split and tensors offloaded."""

from __future__ import annotations

from typing import Unpack

from remat.choice.plan_request import TracePlan
from remat.choice.step import plan_step
from remat.costs.trace_costs import roofline_of
from remat.documents.trace import Trace
from remat.errors import wrong_type
from remat.frontend.api.optimize import checked_options
from remat.frontend.costs.measure import measure_pieces
from remat.frontend.planning.host_limits import host_limits
from remat.frontend.planning.solving import measuring_limit_bytes
from remat.limits.options import pieces_to_try
from remat.plan_options import SOLVE_STEP, KeywordOptions, shows_options
from remat.strategies import Strategy


@shows_options(SOLVE_STEP)
def solve_step(
    trace: Trace,
    budget: int | str,
    strategy: Strategy | None = None,
    **options: Unpack[KeywordOptions],
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
    checked = checked_options(SOLVE_STEP, budget, {"strategy": strategy, **options})
    is_changed = checked.offload is not None or bool(pieces_to_try(checked.split))
    costs = roofline_of(trace) if is_changed else None
    limits = checked.fixed_limits
    limit_bytes = measuring_limit_bytes(trace, limits.budget_after_reserve)
    return plan_step(
        trace,
        checked.request(limits, host_limits(checked.offload, trace, costs, checked.cache)),
        measure=lambda split: measure_pieces(
            split, costs, cache=checked.cache, limit_bytes=limit_bytes
        ),
        progress=checked.progress_callback,
    )
