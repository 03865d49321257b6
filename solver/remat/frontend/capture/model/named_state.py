"""Global variables that the code of a model names, and the classes of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from remat.frontend.common.code_origin import is_framework_code


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


def functions_of(value: object) -> Iterator[FunctionType]:
    """Yield the Python functions that a call of a function, method, `partial` or object runs."""
    if isinstance(value, partial):
        yield from functions_of(value.func)
    elif isinstance(value, MethodType):
        yield from functions_of(value.__func__)
    elif isinstance(value, FunctionType):
        yield value
    elif callable(value) and isinstance(value.__call__, MethodType):
        yield from functions_of(value.__call__)


def named_globals(functions: Iterable[FunctionType]) -> list[tuple[dict[str, Any], set[str]]]:
    """Return the global variables that the code of functions can refer to, as pairs of a namespace
    (the `__globals__` of functions) and names in it. Code is also that of the functions that the
    functions name, also imported ones. Namespaces of torch are left out."""
    pending: list[Any] = list(functions)
    namespaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        wrapped = getattr(function, "__wrapped__", None)
        if id(function) in seen or not isinstance(function, FunctionType):
            continue
        seen.add(id(function))
        if wrapped is not None:
            pending.append(wrapped)
        namespace = function.__globals__
        if is_of_torch(namespace.get("__name__")):
            continue
        _, names = namespaces.setdefault(id(namespace), (namespace, set()))
        new_names = set(_names_of_code(function.__code__)) - names
        names |= new_names
        pending += [namespace[name] for name in new_names if name in namespace]
    return list(namespaces.values())


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


def variables_of(model: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], frozenset[str]]]:
    """Yield the variables whose reads by the model's code are not intercepted: global variables,
    class attributes, closure variables, attributes of parameters and buffers.

    Yields triples of the owner's name, a mapping that has the variables, and their names.
    """
    for namespace, names in named_globals(model_functions(model)):
        if is_framework_code(Path(str(namespace.get("__file__", "")))):
            continue
        present = frozenset(name for name in names if name in namespace)
        yield str(namespace.get("__name__", "")), namespace, present
    for cls in user_classes(model):
        yield cls.__qualname__, vars(cls), frozenset(class_data(cls))
    for function in dict.fromkeys(model_functions(model)):
        names = [name for name in function.__code__.co_freevars if name != "__class__"]
        if names and not is_of_torch(function.__module__):
            cells = dict(
                zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            )
            yield _function_label(function), _Cells({n: cells[n] for n in names}), frozenset(names)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if attributes := vars(tensor):
            yield name, attributes, frozenset(attributes)


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
