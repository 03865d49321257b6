"""`RematModule`: the model with another forward.

A `torch.fx.GraphModule` that shares the model's parameters, buffers, submodules and hooks (the very
same dictionaries) and the signature of its forward, so that optimizers, `state_dict`, `to`,
`train`, weight tying and whoever reads signatures see the model. Evaluation and `no_grad` run the
model's own forward.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx, nn

from remat.documents.program import Program
from remat.frontend.capture.model.compiled_modules import uncompiled
from remat.frontend.common.operators import NAMESPACES
from remat.frontend.runtime.autograd_function import left_alone, run_step
from remat.frontend.runtime.guards import Binding, Call, Signature, Watch, check_call, signature
from remat.frontend.runtime.lower import Compiled, compile_program
from remat.frontend.runtime.output_tracking import ReturnedOutputs
from remat.frontend.runtime.relocation import at_home

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.fx.graph import PythonCode

    from remat.plan import Plan


class Ready:
    """A compiled program bound to a model, with its plan if there is one."""

    def __init__(self, compiled: Compiled, model: nn.Module, plan: Plan | None) -> None:
        self.compiled = compiled
        self.plan = plan
        self._model = model
        self._binding = Binding(compiled.program, model)
        self._returned = ReturnedOutputs(compiled.program)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ready, (self.compiled, self._model, self.plan)

    def __call__(self, leaves: Sequence[torch.Tensor]) -> Any:
        tensors = self._binding.tensors(leaves)
        return self.compiled.rebuild(run_step(self.compiled, tensors, self._returned))

    @property
    def training(self) -> bool:
        """Whether it was planned in training mode."""
        return self.compiled.program.environment.training

    def run(self, call: Call, own: Callable[..., Any]) -> Any:
        """One call of the model."""
        return self(call.leaves)


class Runnable(Protocol):
    """A planned step of a model whose forward is `own`."""

    @property
    def training(self) -> bool: ...

    def run(self, call: Call, own: Callable[..., Any]) -> Any: ...


class Source(Protocol):
    """Where a module's ready programs come from: a planner, or one program from a file."""

    timings_s: dict[str, float]

    def ready(self, watch: Watch, call: Call) -> Runnable: ...

    def current(self) -> Runnable | None: ...

    def rebind(self, model: nn.Module) -> Source: ...

    def follow(self, model: nn.Module) -> None:
        """The model is made of other modules now."""
        ...


class FixedSource:
    """One program, made elsewhere: a call that differs from it is an error."""

    def __init__(self, program: Program, model: nn.Module, compiled: Compiled, plan: Plan | None):
        self._ready = Ready(compiled, model, plan)
        self._program = program
        self._checked: Signature | None = None
        self.timings_s: dict[str, float] = {}

    def ready(self, watch: Watch, call: Call) -> Ready:
        key = signature(watch, call.structure, call.leaves)
        if key != self._checked:
            check_call(self._program, call.structure, call.leaves, watch)
            self._checked = key
        return self._ready

    def current(self) -> Ready | None:
        return self._ready

    def follow(self, model: nn.Module) -> None:
        self._ready = Ready(self._ready.compiled, model, self._ready.plan)
        self._checked = None

    def rebind(self, model: nn.Module) -> Source:
        return FixedSource(self._program, model, self._ready.compiled, self._ready.plan)


class Step:
    """Decides at each call between the plan and the model's `own` forward."""

    def __init__(
        self, model: nn.Module, source: Source, own: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        self.source = source
        self._given = own
        self._watch = Watch(model)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the module, without its hooks."""
        if not torch.is_grad_enabled():  # torch.compile compiles this
            return self._own(*args, **kwargs)
        return self._trained(args, kwargs)

    @left_alone
    def _trained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.model
        current = self.source.current()
        planned_training = current is None or current.training
        if not model.training and planned_training:
            return self._own(*args, **kwargs)
        call = Call.of(args, kwargs, "the arguments ")
        if self._watch.look():
            self.source.follow(model)
        if not self._watch.trains and not any(t.requires_grad for t in call.leaves):
            return self._own(*args, **kwargs)
        return self.source.ready(self._watch, call).run(call, self._own)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return (self._given or self.model.forward)(*args, **kwargs)


def _outer_graph() -> fx.Graph:
    graph = fx.Graph()
    args = graph.create_node("placeholder", "*args", name="args")
    kwargs = graph.create_node("placeholder", "**kwargs", name="kwargs")
    step = graph.create_node("get_attr", "step", name="step")
    graph.output(graph.call_method("run", (step, args, kwargs)))
    return graph


_SHARED = (
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
"""Not copied: what happens to the model's tensors and hooks happens here, and the reverse."""


class RematModule(fx.GraphModule):
    """See `remat.optimize`. `plan`, `program`, `forward_graph` and `backward_graph` are those of
    the latest planned inputs, or None before the first call."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.__dict__["_model"] = model  # asked for its signature below
        root = nn.Module()
        root.step = Step(model, source)  # type: ignore[assignment]
        super().__init__(root, _outer_graph(), class_name=f"Remat{type(model).__name__}")
        self.__dict__.update({name: getattr(model, name) for name in _SHARED})
        self.training = model.training

    def recompile(self) -> PythonCode:
        """As `GraphModule.recompile`; what is made has the signature of the model's forward."""
        code = super().recompile()
        with contextlib.suppress(TypeError, ValueError):  # of a forward that has none
            given = inspect.signature(self.__dict__["_model"].forward)
            me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            # fx makes a class for each module, so that this forward is of this module alone.
            type(self).forward.__signature__ = given.replace(  # type: ignore[attr-defined]
                parameters=[me, *given.parameters.values()]
            )
        return code

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Goes with the hooks, which are the model's."""
        return self.__dict__["_model"]._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:  # type: ignore[override]
        if value is not None:  # but as a new module sets it
            self.__dict__["_model"]._is_full_backward_hook = value

    @property
    def plan(self) -> Plan | None:
        """The schedule with its peak, time and bound."""
        ready = self._ready()
        return ready.plan if ready else None

    @property
    def program(self) -> Program | None:
        """The rewritten step as a document; `program.save(path)` keeps it for the next run."""
        ready = self._ready()
        return ready.compiled.program if ready else None

    @property
    def forward_graph(self) -> fx.GraphModule | None:
        """The forward that runs, printable."""
        ready = self._ready()
        return ready.compiled.forward if ready else None

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """The backward that runs, printable."""
        ready = self._ready()
        return ready.compiled.backward if ready else None

    @property
    def timings_s(self) -> dict[str, float]:
        """Where the time of the latest planning went, in seconds by phase."""
        return dict(self.__dict__["step"].source.timings_s)

    def _ready(self) -> Ready | None:
        ready = self.__dict__["step"].source.current()
        return ready if isinstance(ready, Ready) else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None or name.startswith("__"):
                raise
            return getattr(model, name)

    def train(self, mode: bool = True) -> RematModule:
        """As `nn.Module.train`, on the model itself."""
        self.__dict__["_model"].train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RematModule:
        self.__dict__["_model"]._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state, under the model's own keys."""
        return self.__dict__["_model"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self.__dict__["_model"].load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RematModule:
        model = copy.deepcopy(self.__dict__["_model"], memo)
        return RematModule(model, self.__dict__["step"].source.rebind(model))

    def __copy__(self) -> RematModule:
        return RematModule(self.__dict__["_model"], self.__dict__["step"].source)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.__dict__["_model"], self.__dict__["step"].source)


def _restore(model: nn.Module, source: Source) -> RematModule:
    return RematModule(model, source.rebind(model))


def lower(
    program: Program,
    model: nn.Module,
    *,
    plan: Plan | None = None,
    namespaces: Collection[str] = NAMESPACES,
) -> RematModule:
    """Turn a program, from `remat.rewrite`, a file or the service, into a running module.

    A program for one GPU runs on any other: it is lowered for the one that the model is on.

    The module uses `model`'s own parameters and checks at each call that the call is the one that
    the program was made for. `namespaces` are the torch operator namespaces whose operations may
    run; add your library's where the model uses custom operators.

    Raises `GuardError` where the model does not fit, `DocumentError` for an operation that is not
    allowed.
    """
    model = uncompiled(model)
    program = at_home(program, model)
    compiled = compile_program(program, namespaces)
    return RematModule(model, FixedSource(program, model, compiled, plan))
