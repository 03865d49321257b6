"""`optimize(model, budget)`: the whole way in one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from remat.costs.roofline import Roofline
from remat.errors import TraceError
from remat.frontend.api.nested_plans import check_none_inside
from remat.frontend.capture.model.compiled_modules import uncompiled
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.common.operators import NAMESPACES
from remat.frontend.costs.cache import CostCache
from remat.frontend.memory.reserve import Reserve, reserved
from remat.frontend.planning.options import OptimizeOptions, Service
from remat.frontend.planning.planner import Planner
from remat.frontend.runtime.guards import Call, Watch
from remat.frontend.runtime.module import RematModule
from remat.limits.budget import Budget, is_auto
from remat.limits.outputs import HELD, are_dropped
from remat.limits.reserve import less_reserve
from remat.progress import Progress
from remat.strategies import Strategy


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
    progress: Callable[[Progress], None] | None = None,
    namespaces: Collection[str] = NAMESPACES,
    service: Service | None = None,
    reserve: Reserve | None = None,
    cuda_graphs: bool = False,
    outputs: str = HELD,
) -> RematModule:
    """The same model with a training step that never takes more memory than `budget`.

    `budget` is the peak of bytes allocated during forward and backward, parameters, buffers,
    gradients and batch included: an int (bytes), a string ("8GiB", "7.5 GB", "60%" of the peak
    without recomputation), "min" (the smallest feasible) or "auto" (what the device has free).

    Without example inputs the step is planned at the first call, for the inputs that it then gets;
    with them, now. `reserve` is what of the budget must be left to others: bytes, a string such as
    "2GiB", or the optimizer, whose state is then measured, or foreseen before its first step. On
    CUDA, the budget is kept as torch's allocator counts (see `remat.allocator.fitting`). `costs` is
    "cpu", "cuda" or a `remat.Roofline`; by default operations are timed on the model's own device.
    `differentiate` says which outputs gradients will come from (see `remat.trace`). `service` plans
    elsewhere, as `remat.Client.optimize` does. With `cuda_graphs` nothing random is computed again,
    so that the step can be captured in a CUDA graph. `outputs="dropped"` counts on a caller who
    lets go of what the model returned before the backward. Other keyword arguments are those of
    `remat.solve` and `remat.measure`.

    The result shares the model's parameters and hooks, and behaves as the model. Of a model that
    was compiled by torch.compile, the module inside is planned. Raises `InfeasibleBudget`,
    `BudgetError`, `TraceError`, `SolverTimeout`.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}")
    model = uncompiled(model)
    if isinstance(model, RematModule):
        raise TraceError("this model is optimised already; pass the original one")
    check_none_inside(model)
    planner = Planner(
        options_of(
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
        )
    )
    if example_inputs is None and example_kwargs is None:
        return RematModule(model, planner)
    args, kwargs = normalise_inputs(
        model, () if example_inputs is None else example_inputs, example_kwargs
    )
    check_differentiable(model, args, kwargs)
    planner.ready(Watch(model), Call.of(args, kwargs, "the example inputs "))
    return RematModule(model, planner)


def options_of(
    budget: int | str,
    *,
    differentiate: str | Sequence[str] = "auto",
    namespaces: Collection[str] = NAMESPACES,
    reserve: Reserve | None = None,
    outputs: str = HELD,
    **others: Any,
) -> OptimizeOptions:
    """The options, with what is wrong with budget, reserve and outputs told now. See `optimize`."""
    are_dropped(outputs)
    wanted = None if is_auto(budget) else Budget.parse(budget)
    if reserve is not None:
        reserve_bytes = reserved(reserve).total_bytes
        if wanted is not None:  # what cannot be left fails now, not at midnight
            less_reserve(wanted, reserve_bytes)
    return OptimizeOptions(
        budget=wanted,
        differentiate=differentiate if isinstance(differentiate, str) else tuple(differentiate),
        namespaces=frozenset(namespaces),
        reserve=reserve,
        outputs=outputs,
        **others,
    )
