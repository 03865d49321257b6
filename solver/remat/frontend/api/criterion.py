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
    value_at_place,
)
from remat.frontend.common.code_origin import errors_name_part

Criterion = Callable[..., Any]
"""A function or module that computes a loss from a model's output, and from further arguments."""

_MAX_DEPTH = 3
"""How many containers and objects are followed from a variable to a model or tensor."""


class ModelWithLoss(nn.Module):
    """A module that returns `loss(model(*inputs, **kwargs), *targets, **options)`.

    The last positional arguments are the loss's: as many as it requires after the output, and at
    least one if it takes any. A keyword argument goes to the model, to the loss, or to both, by the
    names in their signatures.

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
        self.training = model.training
        self.loss_variables = LossVariables(model, loss)
        self.register_forward_pre_hook(_update_loss_variables)

    def train(self, mode: bool = True) -> ModelWithLoss:
        """Set the training mode of the model only. No training loop sets the mode of a loss, and a
        teacher must remain in evaluation mode."""
        self.training = mode
        self.model.train(mode)
        return self

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the criterion returns for one batch. Raises `TraceError` for too few
        arguments, a loss of several elements, or one that no gradient comes from."""
        call = _split_arguments(self.model, self.loss, inputs, kwargs)
        with errors_name_part(type(self.model).__name__):
            output = self.model(*call.inputs, **call.model_keywords)
        with errors_name_part(self.criterion_name), self.loss_variables.read_from_module():
            loss = self.loss(output, *call.targets, **call.loss_keywords)
        self._check_loss(loss, output)
        return loss

    @property
    def criterion_name(self) -> str:
        """The criterion, as errors name it."""
        return f"the criterion {getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def _check_loss(self, loss: Any, output: Any) -> None:
        """Raise `TraceError` for a result of the criterion that cannot be trained with."""
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise TraceError(
                f"the loss has the shape {tuple(loss.shape)}: reduce it to one number, such as its "
                "mean"
            )
        if not _tensor_leaves(loss):
            raise TraceError(
                f"{self.criterion_name} returns no tensor, but an object of the type "
                f"{type(loss).__name__}; it must return the loss"
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


class _Call(NamedTuple):
    """The arguments of one call, for the model and for the loss."""

    inputs: tuple[Any, ...]
    model_keywords: dict[str, Any]
    targets: tuple[Any, ...]
    loss_keywords: dict[str, Any]


def _split_arguments(
    model: nn.Module, loss: Criterion, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> _Call:
    """Divide the arguments of a call between a model and its loss, by their signatures. Raises
    `TraceError` if none are left for the model."""
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
        last = "argument is the target" if num_targets == 1 else (
            f"{num_targets} arguments are the targets ({', '.join(p.name for p in required)})"
        )  # fmt: skip
        raise TraceError(
            f"with loss=, the last positional {last} of the loss, and those before it are the "
            f"model's; this call has {len(args)}: pass the model's inputs, then the target"
        )
    inputs, targets = args[: len(args) - num_targets], args[len(args) - num_targets :]
    if is_target_named:  # the others may have a gap, so they are passed by name, too
        for_loss |= {p.name: target for p, target in zip(required, targets, strict=True)}
        targets = ()
    return _Call(inputs, for_model, targets, for_loss)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, or of a module's forward. A function without a
    signature, as of C, may have any number of arguments."""
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]
    return list(signature.parameters.values())


class _Variable(NamedTuple):
    """A variable that the code of a loss names, and what leads from its value to a model or tensor:
    keys of containers and names of attributes."""

    variables: Mapping[str, Any]
    path: Path

    def value(self) -> Any:
        """Return the present value; None if there is none."""
        try:
            return value_at_place(self.variables[self.path[0]], self.path[1:])
        except (AttributeError, LookupError, TypeError):
            return None


class _Variables:
    """The variables outside of a model that its loss reads models and tensors from."""

    def __init__(self, model: nn.Module, loss: Criterion) -> None:
        self._model, self._loss = model, loss
        roots = [model, *([loss] if isinstance(loss, nn.Module) else [])]
        self._ids_inside = {
            id(value)
            for root in roots
            for value in (*root.modules(), *root.parameters(), *root.buffers())
        }
        self.by_name: dict[str, _Variable] = {}
        for variables, names, attributes in _tables_of_loss(loss):
            for name in sorted(names):
                if name in variables:
                    self._follow(_Variable(variables, (name,)), attributes, _MAX_DEPTH)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Variables, (self._model, self._loss)  # places in the objects of this process

    def _follow(self, variable: _Variable, attributes: Collection[str], depth: int) -> None:
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
            steps = [name for name in attributes_of(value) or {} if name in attributes]
        else:
            return
        for step in steps:
            inner = _Variable(variable.variables, (*variable.path, step))
            self._follow(inner, attributes, depth - 1)

    def _unused_name(self, variable: _Variable) -> str:
        """Return a name for a submodule or buffer, made of the path of a variable."""
        label = re.sub(r"\W+", "_", path_label(variable.path)).strip("_")
        candidates = itertools.chain((label,), (f"{label}_{n}" for n in itertools.count(2)))
        return next(
            n for n in candidates if n not in self.by_name and not hasattr(LossVariables, n)
        )


def _tables_of_loss(
    loss: Criterion,
) -> Iterator[tuple[Mapping[str, Any], Collection[str], Collection[str]]]:
    """Yield the variables that the code of a loss names: a mapping, the names in it, and the names
    of attributes that the code uses."""
    if isinstance(loss, functools.partial):
        arguments = {f"argument_{number}": value for number, value in enumerate(loss.args)}
        arguments |= loss.keywords
        yield arguments, arguments, ()
        yield from _tables_of_loss(loss.func)
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
    if owner is not None and not isinstance(owner, type):
        methods = (f for base in type(owner).__mro__ for f in functions_of_class(base))
        names.update(*(names_of_code(method.__code__) for method in methods))
        yield attributes_of(owner) or {}, names, names


def _loaded_names(values: Iterable[Any]) -> dict[int, frozenset[str]]:
    """Return the global variables that functions among `values` read, by the id of the namespace;
    all variables of the Python modules among them. Other names in the code are attributes: a script
    may have a global variable of that name, which the code does not read."""
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
    """The models and tensors outside of a model that its loss uses, by the names of the variables.

    Models are submodules, tensors that require a gradient are parameters, and other tensors are
    buffers, not part of the `state_dict`. So they are inputs of the planned step, which reads their
    content in each call.
    """

    def __init__(self, model: nn.Module, loss: Criterion) -> None:
        super().__init__()
        self._variables = _Variables(model, loss)
        self._non_persistent_buffers_set.update(self._variables.by_name)
        self.update()

    def update(self) -> None:
        """Read the variables again: the program may have assigned other models or tensors."""
        for name, value in self._values():
            if any(table.get(name) is value for table in self._tables):
                continue
            for table in self._tables:
                table.pop(name, None)
            if isinstance(value, nn.Module):
                self._modules[name] = value
            elif isinstance(value, torch.Tensor):
                self._tables[1 if value.requires_grad else 2][name] = value

    @property
    def _tables(self) -> tuple[dict[str, Any], ...]:
        return self._modules, self._parameters, self._buffers

    def read_from_module(self) -> contextlib.AbstractContextManager[object]:
        """Within this context, functions of torch get this module's tensors for those in the
        variables: a capture replaces tensors of modules."""
        tensors = {**self._parameters, **self._buffers}
        replaced = {
            id(value): tensors[name]
            for name, value in self._values()
            if name in tensors and tensors[name] is not value
        }
        return _ReplacedTensors(replaced) if replaced else contextlib.nullcontext()

    def _values(self) -> list[tuple[str, Any]]:
        """Return the present values of the variables by name."""
        return [(name, v.value()) for name, v in self._variables.by_name.items()]


class _ReplacedTensors(TorchFunctionMode):
    """Replaces tensors among the arguments of torch's functions and methods, by id."""

    def __init__(self, replaced: Mapping[int, Any]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def present(leaf: Any) -> Any:
            return self._replaced.get(id(leaf), leaf)

        args, kwargs = tree_map_only(torch.Tensor, present, (args, kwargs or {}))
        return func(*args, **kwargs)


def _update_loss_variables(module: nn.Module, _: tuple[Any, ...]) -> None:
    """Update the variables of a `ModelWithLoss`, or of the planned module that shares its
    submodules, before each call."""
    module.loss_variables.update()  # type: ignore[operator,union-attr]
