"""`optimize(model, budget)`: capture, measure, solve and lower a training step in one call; and
`solve_step(trace, budget)`, the part that solves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from remat.choice.plan_request import TracePlan
from remat.costs.trace_costs import roofline_of
from remat.documents.trace import Trace
from remat.errors import TraceError, wrong_type
from remat.frontend.api.criterion import Criterion, ModelWithLoss
from remat.frontend.capture.model.wrapped_code import unwrap_compiled
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.costs.measure import check_cost_source
from remat.frontend.memory.device_memory import reserve_size
from remat.frontend.planning.planner import Planner
from remat.frontend.planning.solving import plan_trace
from remat.frontend.runtime.guards import ModelCall, ModelTracker
from remat.frontend.runtime.module import RematModule
from remat.limits.limits import Limits
from remat.limits.options import CRITERION, pieces_to_try
from remat.plan_options import (
    MEASURED_BY_SERVICE,
    OPTIMIZE,
    SOLVE_STEP,
    CheckedOptions,
    Door,
    KeywordOptions,
    PlanOptions,
    Service,
    read_options,
    shows_options,
)
from remat.strategies import Strategy


@shows_options(OPTIMIZE)
def optimize(
    model: nn.Module,
    budget: int | str,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Criterion | None = None,
    service: Service | None = None,
    **options: Unpack[PlanOptions],
) -> RematModule:
    """Return the model with a training step whose peak memory is at most `budget`.

    `budget` is the peak of bytes allocated during forward and backward, parameters, buffers,
    gradients and batch included: an int (bytes), a string ("8GiB", "7.5 GB", "60%" of the peak
    without recomputation), "min" (the smallest feasible) or "auto" (what the device has free).

    With example inputs, the step is planned in this call; without them at the first call of the
    result, for the inputs of that call. `reserve` is the part of the budget for other uses: bytes,
    a string such as "2GiB", or the optimizer, whose state is measured, or predicted before its
    first step. On CUDA, the budget holds as torch's allocator counts (see
    `remat.allocator.budget_fitting`). `costs` is "cpu", "cuda" or a `remat.Roofline`; by default
    operations are timed on the model's own device. `differentiate` says which outputs gradients
    will come from (see `remat.trace`). `service` plans in another process, as
    `remat.Client.optimize` does. With `cuda_graphs` no random operation is recomputed, so that the
    step can be captured in a CUDA graph. `outputs="dropped"` assumes that the caller releases the
    model's outputs, except the loss, before the backward. With `outputs="loss"` a training step
    returns only what gradients come from, and tensors of one element: the output keeps its class,
    and using another tensor of it raises `OutputNotComputed`; in evaluation the model returns
    everything. `split` says into how
    many pieces the operations that need the most memory may be split: "auto" if that makes the step
    faster, "off", or a number. With `offload="auto"`, tensors are on the host between forward and
    backward where that makes the step faster than recomputation does, or the budget feasible: in
    pinned memory for a GPU, in a file in `REMAT_OFFLOAD_DIR` for a CPU. At most `host_budget`
    ("16GiB") of them are there at once, by default a half of what is free. `link` has the bandwidth
    of the copies, which is measured by default. `strategy` is as in `remat.solve`, and `cache` as
    in `remat.measure`. The plans for the `max_plans` latest kinds of inputs are retained.
    `namespaces` are those of the operators that the model may use, by default torch's own.

    A terminal shows a progress line if planning takes more than two seconds; with `progress=True`,
    it shows the line at once. A function `progress` is called with each `remat.Progress` instead.
    `progress=False` or the environment variable `REMAT_PROGRESS=0` turns the line off.

    `in_flight` is the number of calls of the model before the backward, as for a triplet loss or
    the discriminator of a GAN. The saved tensors of all calls count in the peak. If a step has more
    calls, a warning says so, and the next step is planned for them.

    If no plan fits the budget, planning raises `InfeasibleBudget`. With `infeasible="smallest"`,
    the step is planned for the smallest feasible peak, as for "min", and a `BudgetWarning` names
    the budget and that peak.

    `loss` is the criterion of a training loop that computes the loss outside of the model, such as
    `torch.nn.CrossEntropyLoss()`. The result then computes `loss(model(*inputs), *targets)`: the
    last positional arguments, in the example inputs too, are what the loss requires after the
    model's output. Keyword arguments go to the model, the loss, or both, by the names in their
    signatures. The loss may return metrics with the loss, in a dictionary with the key "loss" or
    in a tuple with the loss first; no gradients come from the metrics. The loss may use other
    models, such as a reference or a teacher. The model's output is then a value of the plan, which
    may be recomputed or split. The result has the attributes `model` and `loss`, and the submodule
    `loss_variables` with the other models and tensors that the loss uses. Save `result.model`: the
    result's own `state_dict` has these models, too.

    The result shares the model's parameters and hooks, and behaves like the model. If torch.compile
    compiled the model, the module inside is planned. Raises `InfeasibleBudget`, `BudgetError`,
    `TraceError`, `SolverTimeout`.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}")
    model = unwrap_compiled(model)
    if isinstance(model, RematModule):
        raise TraceError("this model is optimised already; pass the original one")
    check_no_planned_submodule(model)
    checked = replace(checked_door_options(OPTIMIZE, budget, options), service=service)
    if loss is not None:
        model = ModelWithLoss(model, loss)
        if checked.differentiate == "auto":
            checked = replace(checked, differentiate=CRITERION)
    planner = Planner(checked)
    if example_inputs is None and example_kwargs is None:
        return RematModule(model, planner)
    args, kwargs = normalise_inputs(
        model, () if example_inputs is None else example_inputs, example_kwargs
    )
    check_differentiable(model, args, kwargs)
    planner.step_for(
        ModelTracker(model, sees_replaced_methods=True),
        ModelCall.of(args, kwargs, "the example inputs "),
    )
    return RematModule(model, planner)


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
    checked = checked_door_options(SOLVE_STEP, budget, {"strategy": strategy, **options})
    assert checked.budget is not None
    is_changed = checked.offload is not None or bool(pieces_to_try(checked.split))
    options_here = replace(checked, costs=roofline_of(trace) if is_changed else None)
    limits = Limits(checked.budget, reserve_size(checked.reserve).total_bytes)
    result = plan_trace(options_here, trace, limits)
    return TracePlan(result.trace, result.plan)


def checked_door_options(
    door: Door, budget: int | str, options: Mapping[str, Any]
) -> CheckedOptions:
    """Return the options of a door as data.

    Raises the errors of `read_options` at once, and the errors for a wrong device in `costs`, for
    an optimizer in `reserve` whose state cannot be predicted, and for a reserve above the budget.
    """
    checked = read_options(door, budget, options)
    if checked.costs != MEASURED_BY_SERVICE:
        check_cost_source(checked.costs)
    reserve_bytes = reserve_size(checked.reserve).total_bytes
    if reserve_bytes and checked.budget is not None:
        Limits(checked.budget, reserve_bytes).check_reserve()
    return checked


FORWARD_ATTRIBUTE = "_remat_forward"
"""The attribute of an enabled module that has its `PlannedForward`: also there where a library
has wrapped the module's `forward` since."""


def check_no_planned_submodule(model: nn.Module) -> None:
    """Raise `TraceError` if a submodule has a plan of its own: both plans would replay the RNG
    state of its random operations."""
    for name, module in model.named_modules():
        if name and (FORWARD_ATTRIBUTE in module.__dict__ or isinstance(module, RematModule)):
            how = "optimised" if isinstance(module, RematModule) else "enabled"
            raise TraceError(
                f"{name} inside of this {type(model).__name__} is {how} by remat already; plan the "
                "whole model, or only its submodules"
            )
