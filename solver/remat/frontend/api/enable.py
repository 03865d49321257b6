"""`enable(model, budget)`: the model itself, with a training step within the budget.

What `nn.Module.compile` is to torch.compile: the class, the signature, `state_dict` keys, hooks on
the model and what others read of it stay as they are, because only its `forward` is another one.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import nn

from remat.blockwise.plan import BlocksPlan
from remat.costs.roofline import Roofline
from remat.errors import InfeasibleBudget, TraceError, nearest
from remat.frontend.api.nested_plans import PLACE, check_none_inside
from remat.frontend.api.optimize import options_of
from remat.frontend.blocks.fsdp2 import check_whole, here, is_sharded
from remat.frontend.blocks.planner import AUTO, BLOCKS, MODEL, SCOPES, ScopedPlanner
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.costs.cache import CostCache
from remat.frontend.memory.reserve import Reserve
from remat.frontend.planning.plan_cache import Entry, Kept
from remat.frontend.planning.planner import Planner
from remat.frontend.runtime.autograd_function import left_alone
from remat.frontend.runtime.guards import Call, Signature, Watch
from remat.frontend.runtime.module import RematModule, Step
from remat.limits.budget import Budget, format_bytes, is_auto, perhaps_a_share
from remat.plan import Plan
from remat.progress import Progress
from remat.strategies import Strategy

logger = logging.getLogger("remat")

Model = TypeVar("Model", bound=nn.Module)

"""Among a model's attributes: what its `forward` was made, also where others have wrapped it."""


class Options(TypedDict, total=False):
    """Of `enable`: as in `remat.optimize`, and what is planned."""

    strategy: Strategy | None
    costs: str | Roofline | None
    cache: str | CostCache | None
    differentiate: str | Sequence[str]
    max_plans: int
    progress: Callable[[Progress], None] | None
    namespaces: Collection[str]
    reserve: Reserve | None
    cuda_graphs: bool
    outputs: str
    scope: str
    in_flight: int


def enable(
    model: Model,
    budget: int | str,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> Model:
    """Have `model` train within `budget` (bytes allocated at most, as in `remat.optimize`).

    It stays the same object, and is returned. With example inputs the step is planned now, else at
    the first call. Hooks of the model itself run as ever, outside of what is planned. Copies,
    pickles and `torch.save` keep it enabled, with their plans. `**options` are those of
    `remat.optimize` and `scope`: what is planned is the whole "model", its repeated "blocks" one by
    one, against one budget for the step, or "auto" (the default): the whole if it can be captured,
    else its blocks, with the rest left to eager mode, which a warning tells with a table. With
    `in_flight` (and "blocks"), so many batches have had their forward before the first has its
    backward, as in the stages of a pipeline: 1F1B has as many as there are stages from this one on.

    Raises `TraceError` where the model is enabled, optimised or compiled already,
    `InfeasibleBudget` where its parameters alone do not fit, and what `remat.optimize` raises.
    """
    options.setdefault("scope", AUTO)
    check_asked(budget, options)
    check_plain(model, options.get("scope", AUTO))
    _refuse_less_than_parameters(model, budget)
    planner = _InPlace(options_of(budget, **options))
    forward = PlannedForward(model, model.__dict__.get("forward"), planner)
    if example_inputs is not None or example_kwargs is not None:
        given = () if example_inputs is None else example_inputs
        args, kwargs = normalise_inputs(model, given, example_kwargs)
        check_differentiable(model, args, kwargs)
        planner.ready(Watch(model), Call.of(args, kwargs, "the example inputs "))
    model.__dict__[PLACE] = model.__dict__["forward"] = forward
    return model


def disable(model: Model) -> Model:
    """Give the model its own forward back. Raises `TraceError` where remat is not enabled."""
    planned = _planned(model)
    planned.is_on = False  # others may have wrapped it since, and call it
    if model.__dict__.get("forward") is planned:
        del model.__dict__["forward"]
        if planned.own is not None:
            model.__dict__["forward"] = planned.own
    del model.__dict__[PLACE]
    return model


def is_enabled(model: nn.Module) -> bool:
    """Whether `enable` was called for it, and `disable` not since."""
    return PLACE in model.__dict__


def plans(model: nn.Module) -> list[Plan | BlocksPlan]:
    """The plans of an enabled model, the one that ran last at the end: a `Plan` of the whole, or a
    `BlocksPlan`. Raises `TraceError`."""
    return [entry.plan for entry in _planned(model).planner.entries]


class PlannedForward:
    """The `forward` of an enabled model. `own` is what the model had in its place, if anything."""

    def __init__(
        self,
        model: nn.Module,
        own: Callable[..., Any] | None,
        source: Planner | Kept,
        is_on: bool = True,
    ) -> None:
        self.model = model
        self.own = own
        self.is_on = is_on
        self._source = source
        self._step: Step | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.unplanned)

    @property
    def unplanned(self) -> Callable[..., Any]:
        """The model's own forward."""
        return MethodType(type(self.model).forward, self.model) if self.own is None else self.own

    @property
    def planner(self) -> Planner:
        """The plans. Those of a copy become its own when they are first asked for: the model that
        a copy belongs to is not whole when this is made."""
        if isinstance(self._source, Kept):
            self._source = _InPlace.of(self._source, self.model)
        return self._source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():  # torch.compile compiles this
            if self.own is not None:
                return self.own(*args, **kwargs)
            return type(self.model).forward(self.model, *args, **kwargs)
        return self._trained(args, kwargs)

    @left_alone
    def _trained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._step is None:
            self._step = Step(self.model, self.planner, self.unplanned)
        return self._step.run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        model, own = copy.deepcopy((self.model, self.own), memo)
        return PlannedForward(model, own, self.planner.kept(), self.is_on)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedForward, (self.model, self.own, self.planner.kept(), self.is_on)


class _InPlace(ScopedPlanner):
    """Captures the model as it was."""

    def _plan(self, model: nn.Module, call: Call, key: Signature) -> Entry:
        if not self.entries:
            _tell_of_checkpointing(model)
        with _as_it_was(model):
            return super()._plan(model, call, key)


def _tell_of_checkpointing(model: nn.Module) -> None:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        logger.warning(
            "gradient checkpointing is on in this %s and does nothing: what is computed again is "
            "what remat plans",
            type(model).__name__,
        )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """With its own forward."""
    state = model.__dict__
    planned = state.get(PLACE)
    forward = state.pop("forward", None)
    if planned is not None and planned.own is not None:
        state["forward"] = planned.own
    try:
        yield
    finally:
        state.pop("forward", None)
        if forward is not None:
            state["forward"] = forward


def _planned(model: nn.Module) -> PlannedForward:
    planned = model.__dict__.get(PLACE) if isinstance(model, nn.Module) else None
    if planned is None:
        raise TraceError(
            f"remat is not enabled for this {type(model).__name__}; remat.enable(model, budget) "
            "does that"
        )
    return planned


def check_plain(model: object, scope: str = MODEL) -> None:
    """Raises `TraceError` for what is enabled, optimised, compiled or sharded already."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if PLACE in model.__dict__:
        raise TraceError(
            f"remat is enabled for this {type(model).__name__} already; call remat.disable(model) "
            "before enabling it for another budget"
        )
    if isinstance(model, RematModule):
        raise TraceError("this model is optimised already; pass the original one")
    check_none_inside(model)
    if "_orig_mod" in model._modules:
        raise TraceError(
            "this model was compiled by torch.compile; pass the module inside (model._orig_mod), "
            'or compile it within the budget: torch.compile(model, backend="remat")'
        )
    if scope == MODEL or not is_sharded(model):
        check_whole(model)


def check_asked(budget: int | str, options: Options) -> None:
    """Raises for what no model could be enabled with, as `enable` would: an integration that does
    so later tells at once."""
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        near = nearest(unknown[0], Options.__annotations__)
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"there is no option {unknown[0]!r}{near}; there are {known}")
    scope = options.get("scope", AUTO)
    _check_scope(scope)
    _check_in_flight(options.get("in_flight", 1), scope)
    if not is_auto(budget):
        Budget.parse(budget)


def _check_scope(scope: object) -> None:
    if scope not in SCOPES:
        near = nearest(scope, SCOPES) if isinstance(scope, str) else ""
        raise ValueError(
            f"scope is {scope!r}{near}; what is planned is the whole {MODEL!r}, its repeated "
            f"{BLOCKS!r} one by one, or {AUTO!r}: the whole if that can be captured, else blocks"
        )


def _check_in_flight(in_flight: object, scope: str) -> None:
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise ValueError(f"in_flight is {in_flight!r}; it is a number of batches, 1 or more")
    if in_flight > 1 and scope != BLOCKS:
        raise ValueError(
            f"in_flight={in_flight} needs scope={BLOCKS!r}: what each block saves is then held so "
            "many times"
        )


def _refuse_less_than_parameters(model: nn.Module, budget: int | str) -> None:
    asked = None if is_auto(budget) else Budget.parse(budget).size_bytes
    if asked is None:
        return
    held_bytes = sum(here(t).nbytes for t in (*model.parameters(), *model.buffers()))
    held_bytes += sum(here(p).nbytes for p in model.parameters() if p.requires_grad)
    if asked < held_bytes:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(asked)} is less than the parameters, their gradients and "
            f"the buffers of this {type(model).__name__} take ({format_bytes(held_bytes)}), which "
            f"no plan changes{perhaps_a_share(asked, held_bytes)}",
            min_feasible_bytes=held_bytes,
        )
