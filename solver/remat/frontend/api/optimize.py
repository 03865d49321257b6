"""`optimize(model, budget)`: capture, measure, solve and lower a training step in one call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from remat.costs.devices import Link
from remat.costs.roofline import Roofline
from remat.errors import TraceError, wrong_type
from remat.frontend.api.model_with_loss import Criterion, ModelWithLoss
from remat.frontend.api.nested_plans import check_no_planned_submodule
from remat.frontend.capture.model.wrapped_code import unwrap_compiled
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.common.operators import NAMESPACES
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.measure import check_cost_source
from remat.frontend.memory.device_memory import Reserve, reserve_size
from remat.frontend.planning.optimize_options import MEASURED_BY_SERVICE, OptimizeOptions, Service
from remat.frontend.planning.planner import Planner
from remat.frontend.runtime.guards import ModelCall, ModelTracker
from remat.frontend.runtime.module import RematModule
from remat.limits.budget import Budget, is_auto
from remat.limits.infeasible import INFEASIBLE_ERROR, is_smallest_accepted
from remat.limits.limits import Limits
from remat.limits.options import (
    OFFLOAD_OFF,
    OUTPUTS_HELD,
    SPLIT_AUTO,
    are_dropped,
    is_offload_allowed,
    parse_host_budget,
    pieces_to_try,
)
from remat.progress import ProgressCallback
from remat.strategies import Strategy
from remat.strategies.base import checked_strategy


def optimize(
    model: nn.Module,
    budget: int | str,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    strategy: Strategy | None = None,
    costs: str | Roofline | None = None,
    cache: str | CostCache | None = None,
    differentiate: str | Sequence[str] = "auto",
    max_plans: int = 8,
    progress: ProgressCallback | bool | None = None,
    namespaces: Collection[str] = NAMESPACES,
    service: Service | None = None,
    reserve: Reserve | None = None,
    cuda_graphs: bool = False,
    outputs: str = OUTPUTS_HELD,
    split: str | int = SPLIT_AUTO,
    offload: str = OFFLOAD_OFF,
    host_budget: int | str | None = None,
    link: Link | None = None,
    loss: Criterion | None = None,
    in_flight: int = 1,
    infeasible: str = INFEASIBLE_ERROR,
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
    of the copies, which is measured by default. Other keyword arguments are those of `remat.solve`
    and `remat.measure`.

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
    `torch.nn.CrossEntropyLoss()`. The result then computes `loss(model(*inputs), target)`: its
    last positional argument, in the example inputs too, is the target. The model's output is then
    a value of the plan, which may be recomputed or split. The result has the submodules `model` and
    `loss`; train and save the model through either.

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
    if loss is not None:
        model = ModelWithLoss(model, loss)
    planner = Planner(
        optimize_options(
            budget,
            strategy=strategy,
            costs=costs,
            cache=cache,
            differentiate=differentiate,
            max_plans=max_plans,
            progress=progress,
            namespaces=namespaces,
            service=service,
            reserve=reserve,
            cuda_graphs=cuda_graphs,
            outputs=outputs,
            split=split,
            offload=offload,
            host_budget=host_budget,
            link=link,
            in_flight=in_flight,
            infeasible=infeasible,
        )
    )
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


def optimize_options(
    budget: int | str,
    *,
    strategy: Strategy | None = None,
    costs: str | Roofline | None = None,
    progress: ProgressCallback | bool | None = None,
    differentiate: str | Sequence[str] = "auto",
    namespaces: Collection[str] = NAMESPACES,
    reserve: Reserve | None = None,
    outputs: str = OUTPUTS_HELD,
    split: str | int = SPLIT_AUTO,
    offload: str = OFFLOAD_OFF,
    host_budget: int | str | None = None,
    in_flight: int = 1,
    infeasible: str = INFEASIBLE_ERROR,
    **others: Any,
) -> OptimizeOptions:
    """Return the options of `optimize` as data. Raises at once for an invalid budget, reserve,
    `strategy`, `costs`, `progress`, `outputs`, `split`, `offload`, `host_budget`, `in_flight` or
    `infeasible`."""
    check_planning_options(strategy, costs, progress)
    check_in_flight(in_flight)
    is_smallest_accepted(infeasible)  # raises for an unknown value
    are_dropped(outputs)  # likewise
    pieces_to_try(split)  # likewise
    has_host_options = parse_host_budget(host_budget) is not None or others.get("link") is not None
    is_allowed = is_offload_allowed(offload)
    if not isinstance(link := others.get("link"), Link | None):
        raise wrong_type("link", "a remat.Link", link, "pass link=remat.Link(55e9, 55e9)")
    if has_host_options and not is_allowed:
        raise ValueError('host_budget and link are for offloaded tensors: pass offload="auto"')
    if is_allowed and others.get("cuda_graphs"):
        raise ValueError(
            "the copies of offloaded tensors cannot be captured in CUDA graphs: pass "
            'offload="off" or cuda_graphs=False'
        )
    if is_allowed and costs == MEASURED_BY_SERVICE:
        raise ValueError(
            'offload="auto" needs the bandwidth between the device and the host of this machine: '
            "leave out `costs`, so that they are measured here"
        )
    parsed_budget = None if is_auto(budget) else Budget.parse(budget)
    if reserve is not None:
        reserve_bytes = reserve_size(reserve).total_bytes
        if parsed_budget is not None:  # fail now, not at the first call
            Limits(parsed_budget, reserve_bytes).check_reserve()
    return OptimizeOptions(
        budget=parsed_budget,
        strategy=strategy,
        costs=costs,
        progress=progress,
        differentiate=differentiate if isinstance(differentiate, str) else tuple(differentiate),
        namespaces=frozenset(namespaces),
        reserve=reserve,
        outputs=outputs,
        split=split,
        offload=offload,
        host_budget=host_budget,
        in_flight=in_flight,
        infeasible=infeasible,
        **others,
    )


def check_planning_options(strategy: object, costs: object, progress: object) -> None:
    """Raise for an invalid `strategy`, `costs` or `progress`, before the first step."""
    if strategy is not None:
        checked_strategy(strategy)
    if costs != MEASURED_BY_SERVICE:
        check_cost_source(costs)
    if not (callable(progress) or isinstance(progress, bool | None)):
        remedy = "pass progress=print, or leave it out"
        raise wrong_type("progress", "a bool or a callable", progress, remedy)


def check_in_flight(in_flight: object) -> None:
    """Raise ValueError unless `in_flight` is a positive integer."""
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise ValueError(f"in_flight is {in_flight!r}; pass the number of calls, 1 or more")
