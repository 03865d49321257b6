"""`ReachedCode`: the functions, classes and global variables that a model's code can reach.

Code is reached by name: a function reaches the global variables that it names, the functions and
classes among them, and, in modules of the user's own project that it names or imports, the
variables whose names it contains. The names are a superset: `helper.count` reaches `count` in every
module that the same function names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from remat.frontend.common.code_origin import is_framework_code, is_user_code

_FRAMEWORKS = frozenset({"torch", "remat", "numpy", *sys.stdlib_module_names}) - {"__main__"}


class Namespace(NamedTuple):
    """The variables of a Python module, and the names by which code can reach some of them."""

    variables: dict[str, Any]
    names: set[str]

    @property
    def label(self) -> str:
        """The name of the Python module."""
        return str(self.variables.get("__name__", ""))

    @property
    def is_of_user(self) -> bool:
        """True if the Python module is part of the user's project, and not of a package."""
        return is_user_module(self.variables)


class ReachedCode:
    """The namespaces of the functions that were added, with the names in their code."""

    def __init__(self) -> None:
        self._namespaces: dict[int, Namespace] = {}
        self._codes: dict[int, CodeType] = {}

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that code can reach, none of Python, torch or NumPy."""
        return list(self._namespaces.values())

    def add_function(self, function: FunctionType) -> Iterator[tuple[Namespace, str, Any]]:
        """Add the code of a function. Yield the global variables that it is first to name: their
        namespaces, names and values."""
        namespace, code = function.__globals__, function.__code__
        if id(code) in self._codes or is_framework_module(namespace):
            return
        self._codes[id(code)] = code
        names = set(names_of_code(code))
        yield from self._add_names(namespace, names, set())
        package = str(namespace.get("__package__") or "")
        for name in names:
            for module_name in (name, f"{package}.{name}"):  # imported within the function
                module = sys.modules.get(module_name)
                if isinstance(module, ModuleType) and is_user_module(vars(module)):
                    yield from self._add_names(vars(module), names, set())

    def add_module(self, module: ModuleType) -> Iterator[tuple[Namespace, str, Any]]:
        """Add all variables of a module of the user's, and yield them as `add_function` does."""
        if is_user_module(vars(module)):
            names = {name for name in vars(module) if not name.startswith("__")}
            yield from self._add_names(vars(module), names, set())

    def _add_names(
        self, variables: dict[str, Any], names: set[str], visited: set[int]
    ) -> Iterator[tuple[Namespace, str, Any]]:
        visited.add(id(variables))
        namespace = self._namespaces.setdefault(id(variables), Namespace(variables, set()))
        first_named = names - namespace.names
        namespace.names.update(names)
        for name in names & variables.keys():
            value = variables[name]
            if isinstance(value, ModuleType):
                below = vars(value)
                if id(below) not in visited and is_user_module(below):
                    yield from self._add_names(below, names, visited)
            elif name in first_named:
                yield namespace, name, value


def names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the names in the code of a function, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of_code(constant)


def functions_of(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class: methods, class methods, static methods and properties."""
    for value in list(vars(cls).values()):
        yield from functions_in(value)


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in a class attribute: a function, or what a descriptor wraps."""
    match value:
        case FunctionType():
            yield value
        case classmethod() | staticmethod():
            yield from functions_in(value.__func__)
        case property():
            for function in (value.fget, value.fset, value.fdel):
                yield from functions_in(function)
        case functools.cached_property() | functools.partialmethod():
            yield from functions_in(value.func)
        case functools._lru_cache_wrapper():
            yield from functions_in(value.__wrapped__)


def is_user_class(cls: type) -> bool:
    """True for a class of the user's project."""
    module = sys.modules.get(cls.__module__)
    return is_user_module({"__name__": cls.__module__} if module is None else vars(module))


def is_user_module(variables: dict[str, Any]) -> bool:
    """True for the variables of a module of the user's project, of a script or of a notebook."""
    file = variables.get("__file__")
    if not isinstance(file, str):
        return not is_framework_module(variables)
    return _is_user_file(file)


def is_framework_module(variables: dict[str, Any]) -> bool:
    """True for the variables of a module of Python, torch, NumPy or remat."""
    name, file = variables.get("__name__"), variables.get("__file__")
    if str(name or "").split(".")[0] not in _FRAMEWORKS:
        return False
    return not isinstance(file, str) or not _is_user_file(file)


@functools.cache
def _is_user_file(file: str) -> bool:
    path = Path(file)
    path = path if path.is_absolute() else Path.cwd() / path
    return is_user_code(path) and not is_framework_code(path)
