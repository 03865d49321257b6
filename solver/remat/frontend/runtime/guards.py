"""Guards: checks that a call matches what its plan assumed, and errors that name the difference.

A captured graph has no guards: with another shape, dtype, autocast mode or training flag it would
compute wrong results silently. Comparing two `CallSignature` tuples is cheap, so each call does
that; only a mismatch is examined field by field, for the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, compress
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.documents.program import Program
from remat.documents.records import Placeholder
from remat.documents.structure import Structure
from remat.errors import GuardError
from remat.frontend.capture.model.hooks import GLOBAL_HOOKS, HOOK_KINDS, is_planned_hook
from remat.frontend.capture.model.values import Code
from remat.frontend.common.pytree import flatten
from remat.frontend.common.quantized import (
    QuantizationTable,
    find_quantization_table,
    is_8bit_layer,
    plain_tensor,
)
from remat.frontend.common.torch_modes import autocast_modes


class TensorProperties(NamedTuple):
    """The properties of a tensor that a plan depends on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool


class ModuleMembers(NamedTuple):
    """The class of a module and the names of its submodules, parameters and buffers. Submodules
    and parameters also have a number: the same module or tensor has one in the whole model."""

    class_name: str  # not all classes can be pickled
    numbers: tuple[tuple[str, int], ...]
    buffers: tuple[str, ...]


class CallSignature(NamedTuple):
    """Everything about a call of a model that its plan depends on, in a form that can be hashed."""

    structure: Structure
    inputs: tuple[TensorProperties, ...]
    parameters: tuple[TensorProperties, ...]
    modules: tuple[ModuleMembers, ...]
    training: bool
    training_exceptions: tuple[str, ...]
    autocast: tuple[str, ...]
    accumulates_gradients: bool
    buffers: tuple[TensorProperties | None, ...] = ()
    tied_buffers: tuple[int, ...] = ()
    hook_ids: tuple[int, ...] = ()
    replaced_methods: tuple[Code, ...] = ()
    defaults: tuple[str, ...] = ()


ACCUMULATION = "accumulation of gradients"

_CHANGES = {
    "structure": "inputs",
    "inputs": "inputs",
    "parameters": "parameters",
    "modules": "modules",
    "training": "training mode",
    "training_exceptions": "training mode",
    "autocast": "autocast",
    "accumulates_gradients": ACCUMULATION,
    "buffers": "buffers",
    "tied_buffers": "buffers",
    "hook_ids": "hooks",
    "replaced_methods": "replaced methods",
    "defaults": "torch's default dtype or device",
}


def signature_changes(one: CallSignature, other: CallSignature) -> list[str]:
    """Return the kinds of differences between two signatures, in words: "inputs", "autocast"; none
    for equal ones."""
    names = [n for n, a, b in zip(one._fields, one, other, strict=True) if a != b]
    return list(dict.fromkeys(_CHANGES[name] for name in names))


class ModelCall(NamedTuple):
    """One call of a model: its arguments, their tensors (`leaves`), and the nested containers
    without the tensors (`structure`)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor]
    structure: Structure

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], label: str) -> ModelCall:
        """Return the call with these arguments. Raises `TraceError` for an argument that cannot be
        captured; `label` names the arguments in the message."""
        return cls(args, kwargs, *flatten((args, kwargs), label))


def tensor_properties(tensor: torch.Tensor) -> TensorProperties:
    """Return the properties of a tensor that a plan depends on."""
    return TensorProperties(
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad
    )


_TABLES = attrgetter("_modules", "_parameters", "_buffers", *HOOK_KINDS)
"""Returns the dictionaries of a module whose content a plan depends on."""

_NUM_TABLES = 3 + len(HOOK_KINDS)


class ModelTracker:
    """Lists of a model's modules, parameters, buffers and hooks, and their last seen properties.

    Walking a model of 150 parameters takes longer than launching a quarter of its forward. So the
    model is walked once; each later call compares lists, and walks the model again only if a module
    or a parameter was replaced, or anything has another name.

    With `sees_replaced_methods`, a signature includes the methods that instances replace, such as
    `model.layer.forward = f`. Not inside of a step, where libraries replace methods for a while.
    """

    def __init__(self, model: nn.Module, *, sees_replaced_methods: bool = False) -> None:
        self.model = model
        self._sees_replaced_methods = sees_replaced_methods
        self._walk_model()

    def _walk_model(self) -> None:
        """List the model's modules, parameters, buffers and hooks, and forget their properties."""
        modules = dict(self.model.named_modules())
        self._module_names, self._modules = list(modules), list(modules.values())
        self.parameters = list(self.model.parameters())
        self._classes_and_tables = self._list_classes_and_tables()
        self._members = self._list_members(self._classes_and_tables)
        self.module_members = self._describe_modules()
        self._buffer_tables = [m._buffers for m in self._modules]
        submodules = self._modules[1:]  # hooks of the model itself run around the plan
        self._hook_tables = [getattr(m, kind) for m in submodules for kind in HOOK_KINDS]
        self._hook_tables += [getattr(nn.modules.module, table) for table in GLOBAL_HOOKS]
        modules = self._modules if self._sees_replaced_methods else ()
        self._methods = [(m.__dict__, _method_names(type(m))) for m in modules]
        self._last_hook_keys: list[int] = []
        self._hook_ids: tuple[int, ...] = ()
        self._last_buffers: list[object] = []
        self._buffer_properties: tuple[TensorProperties | None, ...] = ()
        self._last_buffer_ids: list[int] = []
        self._tied_buffers: tuple[int, ...] = ()
        self._last_parameters: tuple[object, ...] = ()
        self._parameter_properties: tuple[TensorProperties, ...] = ()
        self._training_flags: list[bool] = []
        self._training_exceptions: tuple[str, ...] = ()

    def _list_classes_and_tables(self) -> list[Any]:
        """Return the dictionaries of all modules (`_TABLES`), then the classes of the modules."""
        modules = self._modules
        return [*chain.from_iterable(map(_TABLES, modules)), *map(type, modules)]

    def _list_members(self, tables: list[Any]) -> list[object]:
        """Return the names of submodules, parameters and buffers, then the submodules and the
        parameters, of the modules with these `tables`."""
        end = _NUM_TABLES * len(self._modules)
        modules, parameters, buffers = (tables[kind:end:_NUM_TABLES] for kind in range(3))
        values = (table.values() for table in chain(modules, parameters))
        return [*chain(*modules, *parameters, *buffers), *chain.from_iterable(values)]

    def _describe_modules(self) -> tuple[ModuleMembers, ...]:
        """Return the members of all modules: tied parameters and shared modules have one number."""
        numbers: dict[int, int] = {}
        return tuple(
            ModuleMembers(
                f"{type(module).__module__}.{type(module).__qualname__}",
                tuple(
                    (name, numbers.setdefault(id(member), len(numbers)))
                    for table in (module._modules, module._parameters)
                    for name, member in table.items()
                ),
                tuple(module._buffers),
            )
            for module in self._modules
        )

    def refresh(self) -> bool:
        """Walk the model again if a module or parameter was replaced, or anything was renamed.

        Returns True if plans have to be bound again: after all of this but for parameters that were
        replaced under the same names and ties.
        """
        tables = self._list_classes_and_tables()
        is_bound = all(map(is_, tables, self._classes_and_tables))
        members = self._list_members(tables)
        same_count = len(members) == len(self._members)
        if is_bound and same_count and all(map(is_, members, self._members)):
            return False
        modules, description = self._modules, self.module_members
        self._walk_model()
        same_modules = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        return not (is_bound and same_modules and description == self.module_members)

    def parameter_properties(self) -> tuple[TensorProperties, ...]:
        """Return the properties of all parameters: the same tuple object until one changes."""
        parameters = self.parameters
        current = (
            [p.requires_grad for p in parameters],
            [p.dtype for p in parameters],
            [p.shape for p in parameters],
            [p.stride() for p in parameters],
            [p.device for p in parameters],
        )
        if current != self._last_parameters:
            self._last_parameters = current
            self._parameter_properties = tuple(tensor_properties(p) for p in parameters)
        return self._parameter_properties

    def buffer_properties(self) -> tuple[TensorProperties | None, ...]:
        """Return the properties of all buffers, None for a buffer that is None: the same tuple
        object until one changes."""
        buffers = [b for table in self._buffer_tables for b in table.values()]
        current: list[object] = [
            None if b is None else (b.dtype, b.shape, b.stride(), b.device) for b in buffers
        ]
        if current != self._last_buffers:
            self._last_buffers = current
            self._buffer_properties = tuple(
                None if b is None else tensor_properties(b) for b in buffers
            )
        return self._buffer_properties

    def tied_buffers(self) -> tuple[int, ...]:
        """Return for each buffer the index of the first one that is the same tensor; () if all
        differ."""
        ids = [id(b) for table in self._buffer_tables for b in table.values() if b is not None]
        if ids != self._last_buffer_ids:
            self._last_buffer_ids = ids
            is_any_tied = len(set(ids)) < len(ids)
            self._tied_buffers = tuple(map(ids.index, ids)) if is_any_tied else ()
        return self._tied_buffers

    def hook_ids(self) -> tuple[int, ...]:
        """Return torch's ids of the hooks of submodules, and of all modules, that are part of the
        plan. Torch gives no id twice."""
        keys = [*chain.from_iterable(self._hook_tables)]
        if keys != self._last_hook_keys:
            self._last_hook_keys = keys
            self._hook_ids = tuple(
                key
                for table in self._hook_tables
                for key, hook in table.items()
                if is_planned_hook(hook)
            )
        return self._hook_ids

    def replaced_methods(self) -> tuple[Code, ...]:
        """Return the methods that instances replace, with their code, but for the forwards of
        enabled models. None without `sees_replaced_methods`."""
        return tuple(
            Code(f"{module_name}.{name}", attributes[name])
            for module_name, (attributes, names) in zip(
                self._module_names, self._methods, strict=False
            )
            if not attributes.keys().isdisjoint(names)
            for name in sorted(names & attributes.keys())
            if not type(attributes[name]).__module__.startswith("remat.")
        )

    def training_exceptions(self) -> tuple[str, ...]:
        """Return the names of the submodules whose training flag differs from the model's."""
        flags = [m.training for m in self._modules]
        if flags != self._training_flags:
            self._training_flags = flags
            differs = (flag != flags[0] for flag in flags)
            self._training_exceptions = tuple(compress(self._module_names, differs))
        return self._training_exceptions

    @property
    def has_trainable_parameters(self) -> bool:
        """True if any parameter requires a gradient."""
        return any(p.requires_grad for p in self.parameters)

    @property
    def has_gradients(self) -> bool:
        """True if any trainable leaf parameter has a `.grad` already."""
        return any(p.is_leaf and p.grad is not None for p in self.parameters if p.requires_grad)


@cache
def _method_names(cls: type) -> frozenset[str]:
    """Return the names of the methods of an `nn.Module` class that `nn.Module` does not have, and
    "forward"."""
    names = {
        name
        for base in cls.__mro__
        if base is not nn.Module
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and not name.startswith("__")
    }
    return frozenset({*names, "forward"})


def call_signature(
    tracker: ModelTracker, structure: Structure, leaves: Sequence[torch.Tensor]
) -> CallSignature:
    """Return the signature of a call with these inputs, under the current modes of torch."""
    return CallSignature(
        structure=structure,
        inputs=tuple(tensor_properties(t) for t in leaves),
        parameters=tracker.parameter_properties(),
        modules=tracker.module_members,
        training=tracker.model.training,
        training_exceptions=tracker.training_exceptions(),
        autocast=autocast_modes(),
        accumulates_gradients=tracker.has_gradients,
        buffers=tracker.buffer_properties(),
        tied_buffers=tracker.tied_buffers(),
        hook_ids=tracker.hook_ids(),
        replaced_methods=tracker.replaced_methods(),
        defaults=(str(torch.get_default_dtype()), str(torch.get_default_device())),
    )


_Table = Mapping[str, torch.Tensor | None] | QuantizationTable


class PlaceholderBinding:
    """Finds the tensors for a program's placeholders in a model and in the inputs of a call.

    Parameters and buffers are looked up by name at each call, so that replaced ones
    (`load_state_dict(assign=True)`, `to`) are used. Raises `GuardError` at construction where the
    model does not fit the program.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        # Of each placeholder, the index of an input, or a module's table and the name in it.
        self._sources: list[int | tuple[_Table, str]] = []
        for placeholder in program.placeholders:
            if placeholder.kind == "input":
                self._sources.append(int(placeholder.target))
            elif placeholder.kind in ("parameter", "buffer"):
                self._sources.append(self._locate(placeholder, model))

    @staticmethod
    def _locate(placeholder: Placeholder, model: nn.Module) -> tuple[_Table, str]:
        """Return the dictionary of the module that owns a parameter or buffer, and its name there.
        Raises `GuardError` where the model has none, it differs, or tied ones are not tied."""
        path, _, name = placeholder.target.rpartition(".")
        table: _Table = {}
        try:
            owner = model.get_submodule(path)
            tables = {"parameter": owner._parameters, "buffer": owner._buffers}
            table = tables[placeholder.kind]
            if name == "weight" and is_8bit_layer(owner):  # which computes with its state's weight
                table, name = QuantizationTable(owner), "state.CB"
        except AttributeError:
            if placeholder.kind == "buffer":
                table, name = find_quantization_table(model, placeholder.target)
        tensor = table.get(name)
        if tensor is None:
            raise GuardError(
                f"the program was made for a model with a {placeholder.kind} "
                f"{placeholder.target!r}; this {type(model).__name__} has none. Trace this model"
            )
        check_planned_tensor(f"{placeholder.kind} {placeholder.target}", tensor, placeholder)
        for alias in placeholder.aliases:
            if model.get_parameter(alias) is not tensor:
                raise GuardError(
                    f"the program was made for a model whose {alias} and {placeholder.target} are "
                    "tied (one tensor); in this model they are not. Tie them, or trace this model"
                )
        return table, name

    def tensors(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters, buffers and inputs of a call in the order of the placeholders.

        `leaves` are the input tensors of the call. Raises `GuardError` if one was removed."""
        tensors: list[torch.Tensor] = []
        for source in self._sources:
            if isinstance(source, int):
                tensors.append(leaves[source])
                continue
            table, name = source
            tensor = table.get(name)
            if tensor is None:
                raise GuardError(f"the model's {name} is gone since it was planned; replan it")
            tensors.append(plain_tensor(tensor))
        return tensors


def check_planned_tensor(label: str, tensor: torch.Tensor, placeholder: Placeholder) -> None:
    """Raise `GuardError` if a tensor differs from the planned one in dtype, shape, stride, device
    or, for parameters and buffers, `requires_grad`; `label` names the tensor."""
    planned = placeholder.tensor
    differences = [
        f"{field} {actual} instead of {expected}"
        for field, actual, expected in (
            ("dtype", str(tensor.dtype).removeprefix("torch."), planned.dtype),
            ("shape", tuple(tensor.shape), planned.shape),
            ("stride", tuple(tensor.stride()), planned.stride),
            ("device", str(tensor.device), planned.device),
        )
        if actual != expected
    ]
    if placeholder.kind != "input" and tensor.requires_grad != placeholder.requires_grad:
        differences.append(
            f"requires_grad {tensor.requires_grad} instead of {placeholder.requires_grad}"
        )
    if differences:
        raise GuardError(
            f"{label} differs from what the plan was made for: {'; '.join(differences)}. "
            "Replan for it"
        )


def check_call(
    program: Program, structure: Structure, leaves: Sequence[torch.Tensor], tracker: ModelTracker
) -> None:
    """Raise `GuardError` if a call, or the model's present state, differs from what `program`
    assumes. For programs from a file, which have no planner that could replan."""
    environment = program.environment
    PlaceholderBinding(program, tracker.model)
    if structure != program.inputs:
        raise GuardError(
            "the arguments differ in structure or in a Python value from those that the program "
            "was made for; trace the model with these arguments"
        )
    # An older trace does not say which inputs required a gradient, only which got one.
    has_gradient = {gradient.placeholder for gradient in program.gradients}
    for placeholder in program.placeholders:
        if placeholder.kind == "input":
            index = int(placeholder.target)
            leaf, path = leaves[index], structure.path_of(index)
            check_planned_tensor(f"input {path}", leaf, placeholder)
            is_differentiated = placeholder.requires_grad or placeholder.name in has_gradient
            if leaf.requires_grad and not is_differentiated:
                raise GuardError(
                    f"input {path} requires a gradient, and the program computes none for it; "
                    "trace the model with an input that requires one"
                )
    if autocast_modes() != environment.autocast:
        raise GuardError(
            f"autocast is {autocast_modes() or 'off'}, the program was made with "
            f"{environment.autocast or 'autocast off'}; casts are part of the program"
        )
    if (tracker.model.training, tracker.training_exceptions()) != (
        environment.training,
        environment.training_exceptions,
    ):
        raise GuardError(
            "the model's training flags differ from those that the program was made with; "
            "call model.train() or model.eval() accordingly, or retrace the model"
        )
