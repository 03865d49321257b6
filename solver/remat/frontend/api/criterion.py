"""`ModelWithLoss`: a model and the loss of its training loop as one module, for `optimize(loss=)`.

A loss is a function of the model's output. It may have further arguments, and may use other models
and tensors: attributes of its object, closure variables, or global variables.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from remat.errors import TraceError
from remat.frontend.capture.model.reached_code import (
    functions_of_class,
    is_user_class,
    names_of_code,
    reachable_variables,
)
from remat.frontend.capture.model.values import (
    Path,
    attributes_of,
    is_container,
    items_of_container,
    path_label,
    slot_names,
    value_at_place,
)
from remat.frontend.common.code_origin import errors_name_part

Criterion = Callable[..., Any]
"""A function or module that computes a loss from a model's output, and from further arguments."""

_MAX_DEPTH = 5
"""How many containers and objects are followed from a variable to a model or tensor."""


class ModelWithLoss(nn.Module):
    """A module that calls a model, then a loss on the model's output, and returns what the loss
    returns.

    The last positional arguments go to the loss: as many as it has required parameters after the
    output, and at least one if it accepts any. A keyword argument goes to the model, to the loss,
    or to both, by the names in their signatures.

    With the loss in the planned step, the model's output is a value like any other: it may be
    recomputed, or exist only in pieces. Other models and tensors that the loss uses are parameters
    and buffers of `loss_variables`.
    """

    def __init__(self, model: nn.Module, loss: Criterion) -> None:
        if isinstance(loss, type):
            raise TypeError(f"loss is the class {loss.__name__}; pass an instance of it")
        if not callable(loss):
            raise TypeError(
                f"loss is {loss!r}; it must be a function of the model's output and a target, such "
                "as torch.nn.CrossEntropyLoss()"
            )
        super().__init__()
        self.model = model
        self.loss = loss
        self.loss_objects = list(_objects_of_loss(loss))
        self.training = model.training
        self.loss_variables = LossVariables(model, loss)
        self.register_forward_pre_hook(_update_loss_variables)

    def train(self, mode: bool = True) -> ModelWithLoss:
        """Set the training mode of the model, not of the loss: a teacher in the loss stays in
        evaluation mode. Return self."""
        self.training = mode
        self.model.train(mode)
        return self

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the loss returns for one batch. Raises `TraceError` for too few arguments,
        for a loss of several elements and, in training, for one that requires no gradient."""
        _ = self.loss_objects  # a capture guards the values that are read in them
        call = _split_arguments(self.model, self.loss, inputs, kwargs)
        with errors_name_part(type(self.model).__name__):
            output = self.model(*call.inputs, **call.model_keywords)
        with errors_name_part(self.criterion_name), self.loss_variables.use_registered_tensors():
            result = self.loss(output, *call.targets, **call.loss_keywords)
        self._check_loss(result, output)
        return result

    @property
    def criterion_name(self) -> str:
        """The name of the loss in error messages, such as "the criterion CrossEntropyLoss"."""
        return f"the criterion {getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def _check_loss(self, result: Any, output: Any) -> None:
        """Raise `TraceError` if the loss in a result is a tensor of several elements, there is no
        tensor, or, in training, the loss requires no gradient."""
        loss = result
        if isinstance(result, Mapping) and "loss" in result:
            loss = result["loss"]
        elif isinstance(result, (tuple, list)) and result:
            loss = result[0]
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise TraceError(
                f"the loss has the shape {tuple(loss.shape)}: reduce it to one number, such as its "
                "mean"
            )
        if not _tensor_leaves(loss):
            raise TraceError(
                f"{self.criterion_name} returns no tensor, but an object of the type "
                f"{type(result).__name__}; it must return the loss"
            )
        is_trained = self.training and torch.is_grad_enabled() and _any_requires_grad(output)
        if is_trained and not _any_requires_grad(loss):
            raise TraceError(
                f"no gradient comes from the result of {self.criterion_name}: it is detached, "
                "computed without gradients, or does not use the model's output"
            )


def _any_requires_grad(tree: Any) -> bool:
    """True if any tensor of a pytree requires a gradient."""
    return any(tensor.requires_grad for tensor in _tensor_leaves(tree))


def _tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _SplitArguments(NamedTuple):
    """The arguments of one call, divided into the model's and the loss's."""

    inputs: tuple[Any, ...]
    model_keywords: dict[str, Any]
    targets: tuple[Any, ...]
    loss_keywords: dict[str, Any]


def _split_arguments(
    model: nn.Module, loss: Criterion, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> _SplitArguments:
    """Return the arguments of the model and of its loss, divided by their signatures. Raises
    `TraceError` if too few positional arguments are passed for the loss, or none for the model."""
    parameters = _parameters(loss)
    output = next((p.name for p in parameters if p.kind in _POSITIONAL), None)
    names = {p.name for p in parameters if p.kind in _NAMED and p.name != output}
    names_of_model = {p.name for p in _parameters(model) if p.kind in _NAMED}
    takes_any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for_loss = {
        name: value
        for name, value in keywords.items()
        if name in names or (takes_any_name and name not in names_of_model)
    }
    for_model = {n: v for n, v in keywords.items() if n in names_of_model or n not in for_loss}

    after_output = [p for p in parameters if p.kind in _POSITIONAL and p.name != output]
    required = [p for p in after_output if p.default is p.empty and p.name not in for_loss]
    is_target_named = any(p.name in for_loss for p in after_output)
    takes_target = after_output or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    num_targets = len(required) or int(bool(takes_target) and not is_target_named)
    if len(args) < num_targets or not (len(args) > num_targets or for_model):
        names_of_targets = f" ({', '.join(p.name for p in required)})" if required else ""
        raise TraceError(
            "with loss=, the last positional arguments are the loss's, and the ones before it are "
            f"the model's: this call has {len(args)}, of which the loss takes {num_targets}"
            f"{names_of_targets}. Pass the model's inputs, then the arguments of the loss"
        )
    inputs, targets = args[: len(args) - num_targets], args[len(args) - num_targets :]
    if is_target_named:  # the others may have a gap, so they are passed by name, too
        for_loss |= {p.name: target for p, target in zip(required, targets, strict=True)}
        targets = ()
    return _SplitArguments(inputs, for_model, targets, for_loss)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, or of a module's forward. Builtins without a signature
    count as `*arguments`."""
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]
    return list(signature.parameters.values())


class _VariablePath(NamedTuple):
    """The place of a model or tensor: a namespace, a variable in it, then keys and attributes."""

    namespace: Mapping[str, Any]
    path: Path

    def value(self) -> Any:
        """Return the current value; None if the variable, key or attribute is gone."""
        try:
            return value_at_place(self.namespace[self.path[0]], self.path[1:])
        except (AttributeError, LookupError, TypeError):
            return None


class _VariableFinder:
    """The places of the models and tensors that a loss reads from variables, except for what is in
    the model or in the loss module. They are found once."""

    def __init__(self, model: nn.Module, loss: Criterion) -> None:
        self._model, self._loss = model, loss
        roots = [model, *([loss] if isinstance(loss, nn.Module) else [])]
        self._ids_inside = {
            id(value)
            for root in roots
            for value in (*root.modules(), *root.parameters(), *root.buffers())
        }
        self.by_name: dict[str, _VariablePath] = {}
        for variables, names, attributes in _namespaces_of_loss(loss):
            for name in sorted(names):
                if name in variables:
                    self._follow(_VariablePath(variables, (name,)), attributes, _MAX_DEPTH)

    def __reduce__(self) -> tuple[Any, ...]:
        return _VariableFinder, (self._model, self._loss)  # places in the objects of this process

    def _follow(self, variable: _VariablePath, attributes: Collection[str], depth: int) -> None:
        """Add the models and tensors that a variable leads to, within `depth` containers and
        objects; not the planned model's, and no tensors with a `grad_fn`."""
        value = variable.value()
        if isinstance(value, (nn.Module, torch.Tensor)):
            is_result = isinstance(value, torch.Tensor) and not value.is_leaf
            if id(value) not in self._ids_inside and not is_result:
                self.by_name[self._unused_name(variable)] = variable
            return
        if depth == 0:
            return
        if is_container(value):
            steps = [key for key, _ in items_of_container(value)]
        elif is_user_class(type(value)):
            stored = dict.fromkeys((*(attributes_of(value) or ()), *slot_names(value)))
            steps = [name for name in stored if name in attributes]
        else:
            return
        for step in steps:
            inner = _VariablePath(variable.namespace, (*variable.path, step))
            self._follow(inner, attributes, depth - 1)

    def _unused_name(self, variable: _VariablePath) -> str:
        """Return a name for a submodule or buffer, made of the path of a variable."""
        label = re.sub(r"\W+", "_", path_label(variable.path)).strip("_")
        candidates = itertools.chain((label,), (f"{label}_{n}" for n in itertools.count(2)))
        return next(
            n for n in candidates if n not in self.by_name and not hasattr(LossVariables, n)
        )


def _objects_of_loss(loss: Criterion) -> Iterator[Any]:
    """Yield the objects that belong to a loss: of a method, its object; of a partial, its
    arguments."""
    while isinstance(loss, functools.partial):
        yield from (*loss.args, *loss.keywords.values())
        loss = loss.func
    if isinstance(loss, MethodType):
        yield loss.__self__


def _namespaces_of_loss(
    loss: Criterion,
) -> Iterator[tuple[Mapping[str, Any], Collection[str], Collection[str]]]:
    """Yield each namespace that a loss reads, the variables in it that the code reads, and the
    names of attributes in the code."""
    if isinstance(loss, functools.partial):
        arguments = {f"argument_{number}": value for number, value in enumerate(loss.args)}
        arguments |= loss.keywords
        yield arguments, arguments, ()
        yield from _namespaces_of_loss(loss.func)
        return
    function: Any = loss
    owner: Any = None
    if isinstance(loss, MethodType):
        function, owner = loss.__func__, loss.__self__
    elif not isinstance(loss, (FunctionType, nn.Module)):
        function, owner = getattr(type(loss), "__call__", None), loss  # noqa: B004
    holder = loss if isinstance(loss, nn.Module) else nn.Module()
    names: set[str] = set()
    if isinstance(function, FunctionType):
        vars(holder)["function"] = function
        names.update(names_of_code(function.__code__))
    tables = list(reachable_variables(holder))
    loaded = _loaded_names([function, *(t.variables[n] for t in tables for n in t.names)])
    for table in tables:
        is_namespace = "__name__" in table.variables and "__builtins__" in table.variables
        used = loaded.get(id(table.variables), table.names) if is_namespace else table.names
        yield table.variables, table.names & used, table.attributes or ()
        names.update(table.attributes or ())
    if isinstance(loss, nn.Module):  # a list of it hides a teacher from `state_dict`
        for module in loss.modules():
            yield vars(module), names & vars(module).keys(), names
    elif isinstance(owner, type):
        for cls in owner.__mro__:
            yield vars(cls), names & vars(cls).keys(), names
    elif owner is not None:
        methods = (f for base in type(owner).__mro__ for f in functions_of_class(base))
        names.update(*(names_of_code(method.__code__) for method in methods))
        yield attributes_of(owner) or {}, names, names


def _loaded_names(values: Iterable[Any]) -> dict[int, frozenset[str]]:
    """Return, by the `id` of the namespace, the global variables that functions in `values` load,
    and all variables of Python modules in `values`. `co_names` is not enough: it has names of
    attributes, too, and a global variable may have such a name."""
    names: dict[int, frozenset[str]] = {}
    for value in values:
        if isinstance(value, FunctionType):
            namespace = value.__globals__
            codes = [value.__code__]
            for code in codes:
                codes += [c for c in code.co_consts if isinstance(c, CodeType)]
            read = {
                instruction.argval
                for code in codes
                for instruction in dis.get_instructions(code)
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            }
        elif isinstance(value, ModuleType):
            namespace, read = vars(value), set(vars(value))
        else:
            continue
        names[id(namespace)] = names.get(id(namespace), frozenset()) | read
    return names


class LossVariables(nn.Module):
    """The models and tensors that a loss uses besides its model and arguments.

    Models are submodules, tensors that require a gradient are parameters, and other tensors are
    buffers that are not persistent, each named after its variable. So they are inputs of the
    planned step, which reads their current values in each call. The `state_dict` has the models and
    parameters.
    """

    def __init__(self, model: nn.Module, loss: Criterion) -> None:
        super().__init__()
        self._variables = _VariableFinder(model, loss)
        self._non_persistent_buffers_set.update(self._variables.by_name)
        self.update()

    def update(self) -> None:
        """Read the variables again: the program may have assigned other models or tensors."""
        for name, value in self._values():
            if any(table.get(name) is value for table in self._registries):
                continue
            for table in self._registries:
                table.pop(name, None)
            if isinstance(value, nn.Module):
                self._modules[name] = value
            elif isinstance(value, torch.Tensor):
                self._registries[1 if value.requires_grad else 2][name] = value

    @property
    def _registries(self) -> tuple[dict[str, Any], ...]:
        """The dictionaries in which torch registers submodules, parameters and buffers."""
        return self._modules, self._parameters, self._buffers

    def use_registered_tensors(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which torch's functions receive the tensors that are registered here
        in place of the tensors in the variables. In a capture, registered tensors are fake."""
        tensors = {**self._parameters, **self._buffers}
        replaced = {
            id(value): tensors[name]
            for name, value in self._values()
            if name in tensors and tensors[name] is not value
        }
        return _ReplacedTensors(replaced) if replaced else contextlib.nullcontext()

    def _values(self) -> list[tuple[str, Any]]:
        """Return the current values of the variables by name."""
        return [(name, v.value()) for name, v in self._variables.by_name.items()]


class _ReplacedTensors(TorchFunctionMode):
    """A `TorchFunctionMode` that replaces tensors in arguments, looked up by `id`."""

    def __init__(self, replaced: Mapping[int, Any]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def replacement(leaf: Any) -> Any:
            return self._replaced.get(id(leaf), leaf)

        args, kwargs = tree_map_only(torch.Tensor, replacement, (args, kwargs or {}))
        return func(*args, **kwargs)


def _update_loss_variables(module: nn.Module, _: tuple[Any, ...]) -> None:
    """Update the variables of a `ModelWithLoss`, or of the planned module that shares its
    submodules, before each call."""
    module.loss_variables.update()  # type: ignore[operator,union-attr]
