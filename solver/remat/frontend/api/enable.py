"""`enable(model, budget)`: plan a model's training step in place, as `nn.Module.compile` compiles.

The model object stays the same: its class, signature, `state_dict` keys, attributes and hooks do
not change, because only the instance attribute `forward` is replaced.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from remat.errors import InfeasibleBudget, TraceError
from remat.frontend.api.optimize import (
    FORWARD_ATTRIBUTE,
    check_no_planned_submodule,
    checked_door_options,
)
from remat.frontend.blocks.fsdp2 import check_unsharded, is_sharded, local_tensor
from remat.frontend.blocks.planner import ScopedPlanner
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.planning.plan_cache import PlanEntry, PlannerState
from remat.frontend.planning.planner import Planner
from remat.frontend.runtime.autograd_function import exclude_from_compile
from remat.frontend.runtime.dispatch import StepDispatcher, has_lazy_parameters
from remat.frontend.runtime.guards import CallSignature, ModelCall, ModelTracker
from remat.frontend.runtime.module import RematModule
from remat.limits.budget import Budget, missing_percent_sign_hint
from remat.limits.limits import is_smallest_accepted
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_options import ENABLE, MODEL, CheckedOptions, EnableOptions, shows_options

logger = logging.getLogger("remat")

_new_dispatcher = threading.Lock()

Model = TypeVar("Model", bound=nn.Module)

_SCRIPTABLE_ATTRIBUTE = "__prepare_scriptable__"
"""The method that torch.jit.script calls for the module to compile."""


@shows_options(ENABLE)
def enable(
    model: Model,
    budget: int | str,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[EnableOptions],
) -> Model:
    """Plan the training step of `model` within `budget`, in place, and return the model.

    `budget` is the largest peak of allocated bytes, as in `remat.optimize`. With example inputs the
    step is planned in this call, else at the first call of the model. Hooks of the model run as
    before, outside of the plan. Copies, pickles and `torch.save` keep the model enabled, with its
    plans.

    `**options` are the options of `remat.optimize`, and `scope`: "model" for a plan of the whole
    model; "blocks" for plans of its repeated blocks, which share the budget; or
    "auto" (the default): the whole model if it can be captured, else its blocks, with the rest in
    eager mode and a warning with a table. `in_flight` is the number of calls of the
    model before the backward, as for a triplet loss or the discriminator of a GAN. In pipeline
    parallelism with 1F1B it is the number of stages from this one to the last. If a step has more
    calls, a warning says so, and the next step is planned for them. `split` applies to plans of
    the whole model: operations of blocks stay whole.

    Raises `TraceError` if the model is enabled, optimised or compiled already, `InfeasibleBudget`
    if its parameters alone do not fit, and the errors of `remat.optimize`.
    """
    checked = check_enable_options(budget, options)
    check_not_planned(model, checked.scope)
    if not is_smallest_accepted(checked.infeasible):
        _check_parameters_fit(model, checked.budget)
    planner = _InPlacePlanner(checked)
    forward = PlannedForward(model, model.__dict__.get("forward"), planner)
    if example_inputs is not None or example_kwargs is not None:
        args, kwargs = normalise_inputs(
            model, () if example_inputs is None else example_inputs, example_kwargs
        )
        check_differentiable(model, args, kwargs)
        planner.step_for(
            ModelTracker(model, sees_replaced_methods=True),
            ModelCall.of(args, kwargs, "the example inputs "),
        )
    model.__dict__[FORWARD_ATTRIBUTE] = model.__dict__["forward"] = forward
    model.__dict__[_SCRIPTABLE_ATTRIBUTE] = forward.scriptable_model
    forward.dispatcher()  # from now on, it sees changes of the model
    return model


def disable(model: Model) -> Model:
    """Restore the model's original forward. Raises `TraceError` if remat is not enabled."""
    planned = _planned_forward(model)
    planned.is_on = False  # a library may have wrapped it since, and still call it
    if model.__dict__.get("forward") is planned:
        del model.__dict__["forward"]
        if planned.instance_forward is not None:
            model.__dict__["forward"] = planned.instance_forward
    del model.__dict__[FORWARD_ATTRIBUTE]
    model.__dict__.pop(_SCRIPTABLE_ATTRIBUTE, None)
    return model


def is_enabled(model: nn.Module) -> bool:
    """True if `enable` was called for the model, and `disable` was not called since."""
    return FORWARD_ATTRIBUTE in model.__dict__


def plans(model: nn.Module) -> list[Plan]:
    """Return the plans of an enabled model; the one that ran last is at the end. Each is a `Plan`
    of the whole model, or a `BlocksPlan`. Raises `TraceError` if remat is not enabled."""
    return [entry.plan for entry in _planned_forward(model).planner.entries]


_FUNCTION_ATTRIBUTES = frozenset(
    {"__annotations__", "__closure__", "__code__", "__defaults__", "__func__", "__globals__"}
    | {"__kwdefaults__", "__name__", "__qualname__", "__self__"}
)


class PlannedForward:
    """The `forward` of an enabled model.

    `instance_forward` is the instance attribute `forward` that the model had before, None if there
    was only the method of its class. `is_on` is False once the model is disabled. `plans` is the
    planner, or for a copy of the model the planner's state, until the copy needs its planner.
    """

    def __init__(
        self,
        model: nn.Module,
        instance_forward: Callable[..., Any] | None,
        plans: Planner | PlannerState,
        is_on: bool = True,
    ) -> None:
        self.model = model
        self.instance_forward = instance_forward
        self.is_on = is_on
        self._plans = plans
        self._dispatcher: StepDispatcher | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original_forward)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original_forward

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original forward, such as `__code__`, for torch.export,
        torch.jit and `inspect`."""
        if name in _FUNCTION_ATTRIBUTES:
            return getattr(self.original_forward, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def original_forward(self) -> Callable[..., Any]:
        """The forward that the model had before it was enabled."""
        if self.instance_forward is not None:
            return self.instance_forward
        return MethodType(type(self.model).forward, self.model)

    def scriptable_model(self) -> nn.Module:
        """Return a shallow copy of the model that is not enabled, for torch.jit.script."""
        scriptable = copy.copy(self.model)
        for name in ("forward", FORWARD_ATTRIBUTE, _SCRIPTABLE_ATTRIBUTE):
            scriptable.__dict__.pop(name, None)
        if self.instance_forward is not None:
            scriptable.__dict__["forward"] = self.instance_forward
        return scriptable

    @property
    def planner(self) -> Planner:
        """The model's planner. That of a copy is created when it is first needed: when this object
        is copied or unpickled, the new model is not complete yet."""
        if isinstance(self._plans, PlannerState):
            self._plans = _InPlacePlanner.from_state(self._plans, self.model)
        return self._plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():  # torch.compile compiles this
            if self.instance_forward is not None:
                return self.instance_forward(*args, **kwargs)
            return type(self.model).forward(self.model, *args, **kwargs)
        return self._run_training_step(args, kwargs)

    @exclude_from_compile
    def _run_training_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with gradients under its plan; plan it first if there is none for such a
        call."""
        return self.dispatcher().run(args, kwargs)

    def dispatcher(self) -> StepDispatcher:
        """Return the dispatcher of the calls, the same in all threads."""
        with _new_dispatcher:
            if self._dispatcher is None:
                self._dispatcher = StepDispatcher(self.model, self.planner, self.original_forward)
        return self._dispatcher

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        model, instance_forward = copy.deepcopy((self.model, self.instance_forward), memo)
        return PlannedForward(model, instance_forward, self.planner.state(), self.is_on)

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self.model, self.instance_forward, self.planner.state(), self.is_on
        return PlannedForward, arguments


class _InPlacePlanner(ScopedPlanner):
    """Plans a model that is enabled in place: captures it with its original forward."""

    def _plan(self, model: nn.Module, call: ModelCall, key: CallSignature) -> PlanEntry:
        """Plan the model with its original forward; before the first plan, warn of gradient
        checkpointing."""
        if not self.entries:
            _warn_of_gradient_checkpointing(model)
        with _original_forward_restored(model):
            return super()._plan(model, call, key)


def _warn_of_gradient_checkpointing(model: nn.Module) -> None:
    """Log a warning if the gradient checkpointing of transformers is on: remat ignores it."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        logger.warning(
            "gradient checkpointing is on in this %s and has no effect, because remat's plan "
            "decides what is recomputed. Turn it off",
            type(model).__name__,
        )


class _ForwardWhilePlanning:
    """The forward of an enabled model while one thread plans it: in this thread, the original one.
    Calls of other threads wait for the plan."""

    def __init__(self, planned: PlannedForward) -> None:
        self.__wrapped__ = planned.original_forward
        self._planned = planned
        self._planning_thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_planning = threading.get_ident() == self._planning_thread
        return (self.__wrapped__ if is_planning else self._planned)(*args, **kwargs)


@contextmanager
def _original_forward_restored(model: nn.Module) -> Iterator[None]:
    """Give the model its original forward inside of this context, for this thread. Other threads
    wait for the plan."""
    attributes = model.__dict__
    planned = attributes.get(FORWARD_ATTRIBUTE)
    forward = attributes.pop("forward", None)
    if planned is not None:
        attributes["forward"] = _ForwardWhilePlanning(planned)
    try:
        yield
    finally:
        attributes.pop("forward", None)
        if forward is not None:
            attributes["forward"] = forward


def _planned_forward(model: nn.Module) -> PlannedForward:
    """Return the forward of an enabled model. Raises `TraceError` if remat is not enabled."""
    planned = model.__dict__.get(FORWARD_ATTRIBUTE) if isinstance(model, nn.Module) else None
    if planned is None:
        raise TraceError(
            f"remat is not enabled for this {type(model).__name__}; call "
            "remat.enable(model, budget) first"
        )
    return planned


def check_not_planned(model: object, scope: str = MODEL) -> None:
    """Raise `TraceError` if the model is enabled, optimised or compiled already, or if it is
    sharded and `scope` asks for a plan of the whole model."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if FORWARD_ATTRIBUTE in model.__dict__:
        raise TraceError(
            f"remat is enabled for this {type(model).__name__} already; call remat.disable(model) "
            "before enabling it for another budget"
        )
    if isinstance(model, RematModule):
        raise TraceError("this model is optimised already; pass the original one")
    check_no_planned_submodule(model)
    if "_orig_mod" in model._modules:
        raise TraceError(
            "this model was compiled by torch.compile; pass the module inside (model._orig_mod), "
            'or compile it within the budget: torch.compile(model, backend="remat")'
        )
    if scope == MODEL or not is_sharded(model):
        check_unsharded(model)


def check_enable_options(budget: int | str, options: EnableOptions) -> CheckedOptions:
    """Return the options of `enable` as data. Raises the errors of `enable` for an invalid budget
    or option before there is a model: for integrations that enable a model later."""
    return checked_door_options(ENABLE, budget, options)


def _check_parameters_fit(model: nn.Module, budget: Budget | None) -> None:
    """Raise `InfeasibleBudget` if a budget in bytes is less than parameters, gradients and buffers
    use. Nothing for other budgets, or if parameters are lazy."""
    budget_bytes = None if budget is None else budget.size_bytes
    if budget_bytes is None or has_lazy_parameters(model):
        return
    model_bytes = sum(local_tensor(t).nbytes for t in (*model.parameters(), *model.buffers()))
    model_bytes += sum(local_tensor(p).nbytes for p in model.parameters() if p.requires_grad)
    if budget_bytes < model_bytes:
        raise InfeasibleBudget(
            f"a budget of {format_bytes(budget_bytes)} is less than the parameters, their "
            f"gradients and the buffers of this {type(model).__name__} use "
            f"({format_bytes(model_bytes)}), which no plan changes"
            f"{missing_percent_sign_hint(budget_bytes, model_bytes)}",
            min_feasible_bytes=model_bytes,
        )
