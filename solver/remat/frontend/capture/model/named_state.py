"""Variables that the code of a model names: of Python modules, classes and functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.frontend.common.code_origin import is_framework_code, is_user_code


def model_functions(model: nn.Module) -> Iterator[FunctionType]:
    """Yield the methods of the modules' classes, and the forwards that modules have as attributes.
    For an enabled model, this is its original forward."""
    for cls in dict.fromkeys(b for module in model.modules() for b in type(module).__mro__):
        yield from (f for f in vars(cls).values() if isinstance(f, FunctionType))
    for module in model.modules():
        forward = vars(module).get("forward")
        if not isinstance(forward, (FunctionType, MethodType)):
            forward = getattr(forward, "__wrapped__", None)
        function = forward.__func__ if isinstance(forward, MethodType) else forward
        if isinstance(function, FunctionType):
            yield function


class _NamedCode:
    """The code that functions name, directly or through other code.

    Functions, and methods of the user's classes, are followed through global variables, closures,
    default arguments, and attributes of the user's Python modules. Code of torch is left out.
    """

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        pending: list[Any] = list(functions)
        self.namespaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """Namespaces (the `__globals__` of functions) by `id`, with the names in use."""
        self.classes: dict[type, None] = {}
        """Classes of the user, other than those of modules."""
        self.functions: dict[FunctionType, None] = {}
        """Functions of the user, other than the first ones."""
        self.user_names: set[str] = set()
        """All names in the user's code, of variables and attributes."""
        self._modules: dict[int, ModuleType] = {}
        self._seen: set[int] = set()
        self._first = {id(function) for function in pending}
        while pending:
            while pending:
                self._add(pending.pop(), pending)
            for module in self._modules.values():
                self._add_names(vars(module), self.user_names, pending)

    def _add(self, item: Any, pending: list[Any]) -> None:
        if id(item) in self._seen:
            return
        self._seen.add(id(item))
        if isinstance(item, FunctionType):
            self._add_function(item, pending)
        elif isinstance(item, MethodType):
            pending.append(item.__func__)
        elif isinstance(item, ModuleType):
            if is_user_module(item.__name__):
                self._modules[id(item)] = item
        elif isinstance(item, type):
            self._add_class(item, pending)
        elif not isinstance(item, (nn.Module, torch.Tensor)):
            pending.append(type(item))

    def _add_class(self, cls: type, pending: list[Any]) -> None:
        if issubclass(cls, nn.Module) or not is_user_module(cls.__module__):
            return
        self.classes[cls] = None
        for value in vars(cls).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                pending.append(function)
        pending += cls.__bases__

    def _add_function(self, function: FunctionType, pending: list[Any]) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            pending.append(wrapped)
        namespace = function.__globals__
        if is_of_torch(namespace.get("__name__")):
            return
        names = set(_names_of_code(function.__code__))
        if is_user_module(namespace.get("__name__")):
            self.user_names |= names
            pending += function.__defaults__ or ()
            pending += (function.__kwdefaults__ or {}).values()
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    pending.append(cell.cell_contents)
            if id(function) not in self._first:
                self.functions[function] = None
        self._add_names(namespace, names, pending)

    def _add_names(self, namespace: dict[str, Any], names: set[str], pending: list[Any]) -> None:
        _, names_so_far = self.namespaces.setdefault(id(namespace), (namespace, set()))
        new_names = names - names_so_far
        names_so_far |= new_names
        pending += [namespace[name] for name in new_names if name in namespace]


def user_classes(model: nn.Module) -> list[type]:
    """Return the classes of the model's modules and their bases, without torch's own classes."""
    classes = {base: None for module in model.modules() for base in type(module).__mro__}
    return [cls for cls in classes if not is_of_torch(cls.__module__) and cls is not object]


class _Cells(Mapping[str, Any]):
    """The closure variables of a function by name, without those that have no value yet."""

    def __init__(self, cells: dict[str, Any]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # an empty cell
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class NamedTable(NamedTuple):
    """Variables whose reads by the model's code are not intercepted.

    `variables` are the values by name, of a module, class or function with the name `owner`, and
    `names` those that the code names. For the user's own code, `attributes` are all names in it, of
    which attributes of objects may be read; None for installed packages, whose objects are not
    compared.
    """

    owner: str
    variables: Mapping[str, Any]
    names: frozenset[str]
    attributes: frozenset[str] | None = None


def variables_of(model: nn.Module) -> Iterator[NamedTable]:
    """Yield the variables whose reads by the model's code are not intercepted: global variables,
    attributes of the user's Python modules and classes, methods of the modules' classes, closure
    variables, default arguments, attributes of parameters and buffers, and the environment."""
    code = _NamedCode(model_functions(model))
    attributes = frozenset(code.user_names)
    for namespace, names in code.namespaces.values():
        if is_framework_code(Path(str(namespace.get("__file__", "")))):
            continue
        module = str(namespace.get("__name__", ""))
        present = frozenset(name for name in names if name in namespace)
        yield NamedTable(module, namespace, present, attributes if is_user_module(module) else None)
    for cls in dict.fromkeys((*user_classes(model), *code.classes)):
        names = frozenset((*class_data(cls), *_methods(cls)))
        is_users = is_user_module(cls.__module__)
        yield NamedTable(cls.__qualname__, vars(cls), names, attributes if is_users else None)
    for function in dict.fromkeys((*model_functions(model), *code.functions)):
        if is_of_torch(function.__module__):
            continue
        of_user = attributes if is_user_module(function.__module__) else None
        if cells := _cells(function):
            yield NamedTable(_function_label(function), _Cells(cells), frozenset(cells), of_user)
        if of_user is not None and (defaults := _defaults(function)):
            label = f"the defaults of {_function_label(function)}"
            yield NamedTable(label, defaults, frozenset(defaults), of_user)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if values := vars(tensor):
            yield NamedTable(name, values, frozenset(values), attributes)
    if code.user_names & {"environ", "getenv"}:
        # The dictionary behind `os.environ`, whose items can be compared.
        yield NamedTable("os", {"environ": vars(os.environ)["_data"]}, frozenset({"environ"}))


def _cells(function: FunctionType) -> dict[str, Any]:
    """Return the cells of a function's closure by the variable's name."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in pairs if name != "__class__"}


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the default arguments of a function by name."""
    positional = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    pairs = zip(names[len(names) - len(positional) :], positional, strict=True)
    return {**dict(pairs), **(function.__kwdefaults__ or {})}


def _methods(cls: type) -> Iterator[str]:
    """Yield the names of a class's methods and properties, which a program may replace."""
    kinds = (FunctionType, staticmethod, classmethod, property)
    yield from (name for name, value in vars(cls).items() if isinstance(value, kinds))


def _function_label(function: FunctionType) -> str:
    """Return the qualified name of a function. Add file and line if `functools.wraps` gave the
    function the name of the wrapped one."""
    if not hasattr(function, "__wrapped__"):
        return function.__qualname__
    code = function.__code__
    return f"{function.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def class_data(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither methods nor other descriptors, by name."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__"))
    }


def is_of_torch(module_name: object) -> bool:
    """True for the name of a Python module of torch."""
    return _package(module_name) == "torch"


def is_user_module(name: object) -> bool:
    """True for the name of a Python module that is neither of Python, torch, remat nor an installed
    package."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return file is not None and _is_user_file(file)


@cache
def _is_user_file(file: str) -> bool:
    return is_user_code(Path(file))


def is_searched(value: object) -> bool:
    """True if an object's class is neither torch's nor remat's, so that its attributes count."""
    return _package(type(value).__module__) not in ("torch", "remat")


def _package(module_name: object) -> str:
    return str(module_name or "").split(".")[0]


def _names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the names in the code of a function, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of_code(constant)
