"""`RematModule`: the original model, whose forward runs the planned training step.

A `torch.fx.GraphModule` that shares the model's parameters, buffers, submodules and hooks (the very
same dictionaries) and the signature of its forward. So optimizers, `state_dict`, `to`, `train`,
weight tying and code that inspects signatures see the model. Evaluation and `no_grad` run the
model's original forward.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from remat.documents.program import Program
from remat.errors import wrong_type
from remat.frontend.capture.model.wrapped_code import unwrap_compiled
from remat.frontend.common.operators import NAMESPACES
from remat.frontend.runtime.autograd_function import StepMonitor, run_step
from remat.frontend.runtime.dispatch import StepDispatcher, StepProvider
from remat.frontend.runtime.guards import (
    CallSignature,
    ModelCall,
    ModelTracker,
    PlaceholderBinding,
    call_signature,
    check_call,
)
from remat.frontend.runtime.lower import LoweredProgram, lower_program, program_on_model_device
from remat.frontend.runtime.stores import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx.graph import PythonCode

    from remat.frontend.runtime.autograd_function import SavedTensorCopies
    from remat.plan import Plan

logger = logging.getLogger("remat")


class BoundProgram:
    """A lowered program bound to the tensors of one model, with its plan if there is one."""

    def __init__(self, lowered: LoweredProgram, model: nn.Module, plan: Plan | None) -> None:
        self.lowered = lowered
        self.plan = plan
        self._model = model
        self._binding = PlaceholderBinding(lowered.program, model)
        self._monitor = StepMonitor(lowered.program, model)
        self._stores = StoreWriter(lowered.program, model)

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundProgram, (self.lowered, self._model, self.plan)

    def __call__(self, call: ModelCall, copies: SavedTensorCopies | None = None) -> Any:
        tensors = self._binding.tensors(call.leaves)
        outputs = run_step(self.lowered, tensors, self._monitor, copies)
        self._stores.write(outputs, call.leaves, (call.args, call.kwargs))
        return self.lowered.unflatten_outputs(outputs)

    @property
    def training(self) -> bool:
        """True if the step was planned with the model in training mode."""
        return self.lowered.program.environment.training

    def run(self, call: ModelCall, original_forward: Callable[..., Any]) -> Any:
        """Return the outputs of one call of the model, computed by the program, and write the
        values that it stores. `original_forward` is not used."""
        return self(call)


class FixedStepProvider:
    """Provides one program that was planned elsewhere; a call that it does not fit is an error."""

    def __init__(
        self, program: Program, model: nn.Module, lowered: LoweredProgram, plan: Plan | None
    ) -> None:
        self._step = BoundProgram(lowered, model, plan)
        self._program = program
        self._checked_signature: CallSignature | None = None
        self.timings_s: dict[str, float] = {}

    def step_for(self, tracker: ModelTracker, call: ModelCall) -> BoundProgram:
        """Return the program. Raises `GuardError` where the call does not fit it."""
        signature = call_signature(tracker, call.structure, call.leaves)
        if signature != self._checked_signature:
            check_call(self._program, call.structure, call.leaves, tracker)
            self._checked_signature = signature
        return self._step

    def current_step(self) -> BoundProgram | None:
        """Return the program: there is one from the start."""
        return self._step

    def note_call(self, outputs: Any) -> None:
        """Do nothing: a fixed program is not replanned."""

    def rebind(self, model: nn.Module) -> None:
        """Bind the program to the model's current submodules, after some were replaced."""
        self._step = BoundProgram(self._step.lowered, model, self._step.plan)
        self._checked_signature = None

    def copy_for(self, model: nn.Module) -> StepProvider:
        """Return a provider of the same program for a copy of the model."""
        return FixedStepProvider(self._program, model, self._step.lowered, self._step.plan)


def _dispatching_graph() -> fx.Graph:
    """Return the graph of a `RematModule`: one call of its `StepDispatcher`."""
    graph = fx.Graph()
    args = graph.create_node("placeholder", "*args", name="args")
    kwargs = graph.create_node("placeholder", "**kwargs", name="kwargs")
    step = graph.create_node("get_attr", "step", name="step")
    graph.output(graph.call_method("run", (step, args, kwargs)))
    return graph


_SHARED_ATTRIBUTES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of the model that a `RematModule` uses without copying them: a change of a tensor or
hook of either is a change of both."""


class RematModule(fx.GraphModule):
    """See `remat.optimize`. `plan`, `program`, `forward_graph` and `backward_graph` are for the
    latest planned inputs, and None before the first call."""

    def __init__(self, model: nn.Module, provider: StepProvider) -> None:
        self.__dict__["_model"] = model  # `recompile`, called below, reads its signature
        root = nn.Module()
        root.step = StepDispatcher(model, provider)  # type: ignore[assignment]
        super().__init__(root, _dispatching_graph(), class_name=f"Remat{type(model).__name__}")
        self.__dict__.update({name: getattr(model, name) for name in _SHARED_ATTRIBUTES})
        self.training = model.training

    def recompile(self) -> PythonCode:
        """Generate the code of the forward as `GraphModule.recompile` does, with the signature of
        the model's forward, and return the code."""
        code = super().recompile()
        with contextlib.suppress(TypeError, ValueError):  # a forward without a signature
            signature = inspect.signature(self.__dict__["_model"].forward)
            self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            # fx creates a class for each module, so that this forward is of this module alone.
            type(self).forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
                parameters=[self_parameter, *signature.parameters.values()]
            )
        return code

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """The model's flag, as the backward hooks are the model's."""
        return self.__dict__["_model"]._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:  # type: ignore[override]
        if value is not None:  # None is what `nn.Module.__init__` sets
            self.__dict__["_model"]._is_full_backward_hook = value

    @property
    def plan(self) -> Plan | None:
        """The schedule with its peak, time and bound."""
        step = self._current_program()
        return step.plan if step else None

    @property
    def program(self) -> Program | None:
        """The rewritten step as a document; `program.save(path)` stores it for a later process."""
        step = self._current_program()
        return step.lowered.program if step else None

    @property
    def forward_graph(self) -> fx.GraphModule | None:
        """The forward graph that runs, printable."""
        step = self._current_program()
        return step.lowered.forward_graph if step else None

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """The backward graph that runs, printable."""
        step = self._current_program()
        return step.lowered.backward_graph if step else None

    @property
    def timings_s(self) -> dict[str, float]:
        """The seconds that each phase of the latest planning took."""
        return dict(self._provider.timings_s)

    @property
    def _provider(self) -> StepProvider:
        """The provider of planned steps: a planner, or one fixed program."""
        return self.__dict__["step"].provider

    def _current_program(self) -> BoundProgram | None:
        """Return the step that ran or was planned last; None before, and for a plan of blocks."""
        step = self._provider.current_step()
        return step if isinstance(step, BoundProgram) else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None or name.startswith("__"):
                raise
            return getattr(model, name)

    def train(self, mode: bool = True) -> RematModule:
        """Set the training mode of the model, as `nn.Module.train`."""
        self.__dict__["_model"].train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RematModule:
        self.__dict__["_model"]._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state under the model's keys."""
        return self.__dict__["_model"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the model."""
        return self.__dict__["_model"].load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RematModule:
        return _remat_module_for_copied_model(
            copy.deepcopy(self.__dict__["_model"], memo), self._provider
        )

    def __copy__(self) -> RematModule:
        return RematModule(self.__dict__["_model"], self._provider)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remat_module_for_copied_model, (self.__dict__["_model"], self._provider)


def _remat_module_for_copied_model(model: nn.Module, provider: StepProvider) -> RematModule:
    """Return the `RematModule` of a copied or unpickled model, with a copy of the provider."""
    return RematModule(model, provider.copy_for(model))


def lower(
    program: Program,
    model: nn.Module,
    *,
    plan: Plan | None = None,
    namespaces: Collection[str] = NAMESPACES,
) -> RematModule:
    """Turn a program from `remat.rewrite`, a file or the service into a module that trains.

    A program for one GPU runs on any other: it is lowered for the one that the model is on.

    The module uses `model`'s own parameters and checks that each call matches the one that the
    program was planned for. `namespaces` are the torch operator namespaces whose operations may
    run; add your library's where the model uses custom operators.

    Raises `GuardError` where the model does not fit, `DocumentError` for an operation that is not
    allowed, and TypeError for another object in place of the program.
    """
    if not isinstance(program, Program):
        remedy = "pass remat.rewrite(trace, plan.schedule)"
        raise wrong_type("lower", "a Program", program, remedy)
    model = unwrap_compiled(model)
    if not isinstance(model, nn.Module):
        raise wrong_type("lower", "a torch.nn.Module", model, "pass the model that was traced")
    program = program_on_model_device(program, model)
    lowered = lower_program(program, namespaces)
    return RematModule(model, FixedStepProvider(program, model, lowered, plan))
