"""What a plan assumed of a call, and a clear word on what differs.

There are no guards in a captured graph: another shape, dtype, autocast mode or training flag would
run silently wrong. A call's `Signature` is compared as a whole, which is cheap; only on a
difference is it taken apart for the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.documents.program import Program
from remat.documents.records import Placeholder
from remat.documents.structure import Structure
from remat.errors import GuardError
from remat.frontend.capture.model.context import autocast_modes
from remat.frontend.capture.model.hooks import HOOK_KINDS, is_part
from remat.frontend.common.pytree import flatten


class TensorKey(NamedTuple):
    """What is compared of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool


class Signature(NamedTuple):
    """Everything that a plan depends on, of one call."""

    structure: Structure
    inputs: tuple[TensorKey, ...]
    parameters: tuple[TensorKey, ...]
    modules: tuple[str, ...]
    training: bool
    training_exceptions: tuple[str, ...]
    autocast: tuple[str, ...]
    accumulating: bool
    buffers: tuple[TensorKey | None, ...] = ()
    hooks: tuple[int, ...] = ()


class Call(NamedTuple):
    """One call of a module: its arguments, and these with the tensors taken out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor]
    structure: Structure

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> Call:
        """`what` names the arguments in errors. Raises `TraceError`."""
        return cls(args, kwargs, *flatten((args, kwargs), what))


def tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Key of a real tensor."""
    return TensorKey(
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad
    )


class Watch:
    """A model's modules, parameters, buffers and hooks in lists, and what they were like when last
    looked at.

    Walking a model of 150 parameters takes longer than launching a quarter of its forward. Here it
    is walked once; later calls compare lists, and walk again where a module or a parameter is
    another one than it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._walk()

    def _walk(self) -> None:
        modules = dict(self.model.named_modules())
        self._names, self._modules = list(modules), list(modules.values())
        self.parameters = list(self.model.parameters())
        kinds = map(type, self._modules)  # by name: not all classes can be pickled
        self.kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        self._parts = self._found_parts()
        self._tables = [m._parameters for m in self._modules]
        self._slots = self._found_slots()
        self._buffers = [m._buffers for m in self._modules]
        inside = self._modules[1:]  # those of the model itself run around the plan
        self._hooks = [getattr(m, kind) for m in inside for kind in HOOK_KINDS]
        self._hook_keys: list[int] = []
        self._hooks_told: tuple[int, ...] = ()
        self._kept_buffers: list[object] = []
        self._buffer_keys: tuple[TensorKey | None, ...] = ()
        self._kept: tuple[object, ...] = ()
        self._keys: tuple[TensorKey, ...] = ()
        self._flags: list[bool] = []
        self._exceptions: tuple[str, ...] = ()

    def _found_parts(self) -> list[object]:
        tables = [m._modules for m in self._modules], [m._parameters for m in self._modules]
        return [*chain.from_iterable(table.values() for table in chain(*tables))]

    def _found_slots(self) -> list[tuple[str, int]]:
        """The names of parameters, and which of them are one tensor."""
        first: dict[int, int] = {}
        slots = ((name, id(p)) for table in self._tables for name, p in table.items())
        return [(name, first.setdefault(own, i)) for i, (name, own) in enumerate(slots)]

    def look(self) -> bool:
        """Walk the model again if it is made of other parts now. Whether what was bound to it has
        to be again: a module is another one, a parameter has another name, or is tied otherwise."""
        parts = self._found_parts()
        if len(parts) == len(self._parts) and all(map(is_, parts, self._parts)):
            return False
        modules, slots = self._modules, self._slots
        self._walk()
        same = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        return not same or slots != self._slots

    def parameter_keys(self) -> tuple[TensorKey, ...]:
        """Keys of all parameters: the same object as long as nothing has changed."""
        found = self.parameters
        now = (
            [p.requires_grad for p in found],
            [p.dtype for p in found],
            [p.shape for p in found],
            [p.stride() for p in found],
            [p.device for p in found],
        )
        if now != self._kept:
            self._kept = now
            self._keys = tuple(tensor_key(p) for p in found)
        return self._keys

    def buffer_keys(self) -> tuple[TensorKey | None, ...]:
        """Keys of all buffers, likewise; None for one that is not there."""
        found = [b for table in self._buffers for b in table.values()]
        now: list[object] = [
            None if b is None else (b.dtype, b.shape, b.stride(), b.device) for b in found
        ]
        if now != self._kept_buffers:
            self._kept_buffers = now
            self._buffer_keys = tuple(None if b is None else tensor_key(b) for b in found)
        return self._buffer_keys

    def hook_keys(self) -> tuple[int, ...]:
        """The numbers of the hooks of modules inside, which no other hook has ever had."""
        now = [*chain.from_iterable(self._hooks)]
        if now != self._hook_keys:
            self._hook_keys = now
            self._hooks_told = tuple(
                key for table in self._hooks for key, hook in table.items() if is_part(hook)
            )
        return self._hooks_told

    def training_exceptions(self) -> tuple[str, ...]:
        """As `surroundings.training_exceptions`."""
        flags = [m.training for m in self._modules]
        if flags != self._flags:
            self._flags = flags
            self._exceptions = tuple(compress(self._names, (on != flags[0] for on in flags)))
        return self._exceptions

    @property
    def trains(self) -> bool:
        """Whether any parameter requires a gradient."""
        return any(p.requires_grad for p in self.parameters)

    @property
    def accumulates(self) -> bool:
        """Whether any parameter has a gradient already."""
        return any(p.grad is not None for p in self.parameters if p.requires_grad)


def signature(watch: Watch, structure: Structure, leaves: Sequence[torch.Tensor]) -> Signature:
    """The signature of a call with these inputs, as things are now."""
    return Signature(
        structure=structure,
        inputs=tuple(tensor_key(t) for t in leaves),
        parameters=watch.parameter_keys(),
        modules=watch.kinds,
        training=watch.model.training,
        training_exceptions=watch.training_exceptions(),
        autocast=autocast_modes(),
        accumulating=watch.accumulates,
        buffers=watch.buffer_keys(),
        hooks=watch.hook_keys(),
    )


class Binding:
    """A program's placeholders found in a model: looked up at each call, so that parameters that
    were replaced (`load_state_dict(assign=True)`, `to`) are the ones that run.

    Raises `GuardError` at construction where the model does not fit the program.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._found: list[int | tuple[Mapping[str, torch.Tensor | None], str]] = []
        for placeholder in program.placeholders:
            if placeholder.kind == "input":
                self._found.append(int(placeholder.target))
            elif placeholder.kind in ("parameter", "buffer"):
                self._found.append(self._find(placeholder, model))

    @staticmethod
    def _find(
        placeholder: Placeholder, model: nn.Module
    ) -> tuple[Mapping[str, torch.Tensor | None], str]:
        path, _, name = placeholder.target.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            owner = nn.Module()
        tables = {"parameter": owner._parameters, "buffer": owner._buffers}
        table = tables[placeholder.kind]
        tensor = table.get(name)
        if tensor is None:
            raise GuardError(
                f"the program was made for a model with a {placeholder.kind} "
                f"{placeholder.target!r}; this {type(model).__name__} has none. Trace this model"
            )
        check_tensor(f"{placeholder.kind} {placeholder.target}", tensor, placeholder)
        for alias in placeholder.aliases:
            if model.get_parameter(alias) is not tensor:
                raise GuardError(
                    f"the program was made for a model whose {alias} and {placeholder.target} are "
                    "tied (one tensor); in this model they are not. Tie them, or trace this model"
                )
        return table, name

    def tensors(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a call: parameters, buffers and inputs, as the placeholders are."""
        found: list[torch.Tensor] = []
        for place in self._found:
            if isinstance(place, int):
                found.append(leaves[place])
                continue
            table, name = place
            tensor = table.get(name)
            if tensor is None:
                raise GuardError(f"the model's {name} is gone since it was planned; plan it anew")
            found.append(tensor)
        return found


def check_tensor(what: str, tensor: torch.Tensor, placeholder: Placeholder) -> None:
    """Raise `GuardError` that says how a tensor differs from what the plan assumed."""
    planned = placeholder.tensor
    differences = [
        f"{field} {found} instead of {expected}"
        for field, found, expected in (
            ("dtype", str(tensor.dtype).removeprefix("torch."), planned.dtype),
            ("shape", tuple(tensor.shape), planned.shape),
            ("stride", tuple(tensor.stride()), planned.stride),
            ("device", str(tensor.device), planned.device),
        )
        if found != expected
    ]
    if placeholder.kind != "input" and tensor.requires_grad != placeholder.requires_grad:
        differences.append(
            f"requires_grad {tensor.requires_grad} instead of {placeholder.requires_grad}"
        )
    if differences:
        raise GuardError(
            f"{what} differs from what the plan was made for: {'; '.join(differences)}. "
            "Plan again for it"
        )


def check_call(
    program: Program, structure: Structure, leaves: Sequence[torch.Tensor], watch: Watch
) -> None:
    """Raise `GuardError` where a call, or the model by now, differs from what a program without its
    model's planner (one that was lowered from a file) was made for."""
    environment = program.environment
    Binding(program, watch.model)
    if structure != program.inputs:
        raise GuardError(
            "the arguments differ in structure or in a Python value from those that the program "
            "was made for; trace the model with these arguments"
        )
    # An older trace does not say which inputs required a gradient, only which got one.
    has = {gradient.placeholder for gradient in program.gradients}
    for placeholder in program.placeholders:
        if placeholder.kind == "input":
            number = int(placeholder.target)
            leaf, path = leaves[number], structure.path_of(number)
            check_tensor(f"input {path}", leaf, placeholder)
            if leaf.requires_grad and not (placeholder.requires_grad or placeholder.name in has):
                raise GuardError(
                    f"input {path} requires a gradient, and the program computes none for it; "
                    "trace the model with an input that requires one"
                )
    if autocast_modes() != environment.autocast:
        raise GuardError(
            f"autocast is {autocast_modes() or 'off'}, the program was made with "
            f"{environment.autocast or 'autocast off'}; casts are part of the program"
        )
    if (watch.model.training, watch.training_exceptions()) != (
        environment.training,
        environment.training_exceptions,
    ):
        raise GuardError(
            "the model's training flags differ from those that the program was made with; "
            "call model.train() or model.eval() accordingly, or trace it anew"
        )
