"""The functions, classes and variables that a model's code can reach.

Code is reached by name: a function reaches the global variables that it names, the functions and
classes among them, and, in modules of the user's own project that it names or imports, the
variables whose names it contains. The names are a superset: `helper.count` reaches `count` in every
module that the same function names.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.frontend.capture.model.values import package_of
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
        """Return the namespaces that the added code can reach, none of Python, torch, NumPy or
        remat."""
        return list(self._namespaces.values())

    def add_function(self, function: FunctionType) -> Iterator[tuple[Namespace, str, Any]]:
        """Add the code of a function. Yield the global variables that it is first to name: their
        namespaces, names and values. Yield nothing for code that was added before, or is part of
        Python, torch, NumPy or remat."""
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
        """Add all variables of a Python module of the user's project, none of a package's, and
        yield them as `add_function` does."""
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


def functions_of_class(cls: type) -> Iterator[FunctionType]:
    """Yield the functions that a class defines, without its bases': methods, class methods, static
    methods and properties."""
    for value in list(vars(cls).values()):
        yield from functions_in_attribute(value)


def functions_in_attribute(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in a class attribute: the attribute itself if it is a function, or those
    that a descriptor such as a property wraps."""
    match value:
        case FunctionType():
            yield value
        case classmethod() | staticmethod():
            yield from functions_in_attribute(value.__func__)
        case property():
            for function in (value.fget, value.fset, value.fdel):
                yield from functions_in_attribute(function)
        case functools.cached_property() | functools.partialmethod():
            yield from functions_in_attribute(value.func)
        case functools._lru_cache_wrapper():
            yield from functions_in_attribute(value.__wrapped__)


def is_user_class(cls: type) -> bool:
    """True for a class of the user's project."""
    module = sys.modules.get(cls.__module__)
    return is_user_module({"__name__": cls.__module__} if module is None else vars(module))


def is_user_module(variables: dict[str, Any]) -> bool:
    """True for the variables of a Python module of the user's project, of a script or of a
    notebook."""
    file = variables.get("__file__")
    if not isinstance(file, str):
        return not is_framework_module(variables)
    return _is_user_file(file)


def is_framework_module(variables: dict[str, Any]) -> bool:
    """True for the variables of a Python module of Python, torch, NumPy or remat, and not of a file
    of the user's project with such a name."""
    name, file = variables.get("__name__"), variables.get("__file__")
    if package_of(name) not in _FRAMEWORKS:
        return False
    return not isinstance(file, str) or not _is_user_file(file)


@functools.cache
def _is_user_file(file: str) -> bool:
    path = Path(file)
    path = path if path.is_absolute() else Path.cwd() / path
    return is_user_code(path) and not is_framework_code(path)


def model_functions(model: nn.Module) -> Iterator[FunctionType]:
    """Yield the methods of the classes of the model's modules, and the functions that modules have
    as attributes: for the forward of an enabled model, the original one."""
    for cls in dict.fromkeys(b for module in model.modules() for b in type(module).__mro__):
        yield from (f for f in vars(cls).values() if isinstance(f, FunctionType))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name == "forward" and not isinstance(value, (FunctionType, MethodType)):
                value = getattr(value, "__wrapped__", None)
            function = value.__func__ if isinstance(value, MethodType) else value
            if isinstance(function, FunctionType):
                yield function


class _NamedCode:
    """The functions and classes that a model's code names, directly or through other code.

    In the user's project they are followed through global variables, closures, default arguments
    and attributes of Python modules.
    """

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self.code = ReachedCode()
        self.classes: dict[type, None] = {}
        """Classes of the user's project that are no modules."""
        self.functions: dict[FunctionType, None] = {}
        """Functions of the user's project that are not among `functions`."""
        pending: list[Any] = list(functions)
        self._first = {id(function) for function in pending}
        self._seen: set[int] = set()
        while pending:
            item = pending.pop()
            if id(item) not in self._seen:
                self._seen.add(id(item))
                pending += self._named_by(item)

    @property
    def attributes(self) -> frozenset[str]:
        """All names in the code of the user's project, of variables and attributes."""
        return frozenset(n for s in self.code.namespaces() if s.is_of_user for n in s.names)

    def _named_by(self, item: Any) -> Iterator[Any]:
        """Yield the values that a function or class names; the class of any other object."""
        if isinstance(item, FunctionType):
            yield from self._named_by_function(item)
        elif isinstance(item, MethodType):
            yield item.__func__
        elif isinstance(item, type):
            if is_user_class(item) and not issubclass(item, nn.Module):
                self.classes[item] = None
                yield from functions_of_class(item)
                yield from (*item.__bases__, type(item))
        elif not isinstance(item, (nn.Module, torch.Tensor)):
            yield type(item)

    def _named_by_function(self, function: FunctionType) -> Iterator[Any]:
        yield getattr(function, "__wrapped__", None)
        for _, _, value in self.code.add_function(function):
            yield value
        if is_user_module(function.__globals__):
            yield from _default_arguments(function).values()
            yield from _ClosureVariables(closure_cells_of(function)).values()
            if id(function) not in self._first:
                self.functions[function] = None


def user_classes(model: nn.Module) -> list[type]:
    """Return the classes of the model's modules and their bases, without torch's own classes."""
    classes = {base: None for module in model.modules() for base in type(module).__mro__}
    return [
        cls for cls in classes if not is_torch_module_name(cls.__module__) and cls is not object
    ]


class _ClosureVariables(Mapping[str, Any]):
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

    `variables` maps names to values in the module, class or function `owner`; `names` are those
    that the code uses. `attributes` are all names in the user's code, so the attributes of objects
    that it may read; None for installed packages, whose objects are not compared.
    """

    owner: str
    variables: Mapping[str, Any]
    names: frozenset[str]
    attributes: frozenset[str] | None = None


def reachable_variables(model: nn.Module) -> Iterator[NamedTable]:
    """Yield the variables whose reads by the model's code are not intercepted: global variables,
    attributes of the user's Python modules and classes, methods of the modules' classes, closure
    variables, default arguments and attributes of functions, attributes of parameters and buffers,
    and the environment."""
    named = _NamedCode(model_functions(model))
    attributes = named.attributes
    for namespace in named.code.namespaces():
        present = frozenset(name for name in namespace.names if name in namespace.variables)
        content = attributes if namespace.is_of_user else None
        yield NamedTable(namespace.label, namespace.variables, present, content)
    classes = *user_classes(model), *named.classes
    metaclasses = (m for cls in classes for m in type.mro(type(cls)) if is_user_class(m))
    for cls in dict.fromkeys((*classes, *metaclasses)):
        names = frozenset((*class_data_attributes(cls), *_method_names(cls)))
        content = attributes if is_user_class(cls) else None
        yield NamedTable(cls.__qualname__, vars(cls), names, content)
    for function in dict.fromkeys((*model_functions(model), *named.functions)):
        if is_torch_module_name(function.__module__):
            continue
        content = attributes if is_user_module(function.__globals__) else None
        if cells := closure_cells_of(function):
            yield NamedTable(
                _function_label(function), _ClosureVariables(cells), frozenset(cells), content
            )
        if content is not None and (defaults := _default_arguments(function)):
            label = f"the defaults of {_function_label(function)}"
            yield NamedTable(label, defaults, frozenset(defaults), content)
        if content is not None and (names := content & vars(function).keys()):
            label = f"the attributes of {_function_label(function)}"
            yield NamedTable(label, vars(function), frozenset(names), content)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if values := vars(tensor):
            yield NamedTable(name, values, frozenset(values), attributes)
    if attributes & {"environ", "getenv"}:
        # The dictionary behind `os.environ`, whose items can be compared.
        yield NamedTable("os", {"environ": vars(os.environ)["_data"]}, frozenset({"environ"}))


@contextmanager
def results_of_capture_not_cached(model: nn.Module) -> Iterator[None]:
    """Clear the caches of functions (`functools.lru_cache`) that the model's code names and that
    have computed anything within the context: the results may be fake tensors."""
    values = (t.variables[name] for t in reachable_variables(model) for name in t.names)
    cached = {id(v): v for v in values if isinstance(v, functools._lru_cache_wrapper)}
    before = {key: function.cache_info().misses for key, function in cached.items()}
    try:
        yield
    finally:
        for key, function in cached.items():
            if function.cache_info().misses > before[key]:
                function.cache_clear()


def closure_cells_of(function: FunctionType) -> dict[str, Any]:
    """Return the cells of a function's closure by the variable's name, without `__class__`."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in pairs if name != "__class__"}


def _default_arguments(function: FunctionType) -> dict[str, Any]:
    """Return the values of a function's default arguments by name."""
    positional = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    pairs = zip(names[len(names) - len(positional) :], positional, strict=True)
    return {**dict(pairs), **(function.__kwdefaults__ or {})}


def _method_names(cls: type) -> Iterator[str]:
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


def class_data_attributes(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are neither methods nor other descriptors, by name."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") or name == "_abc_impl" or hasattr(value, "__get__"))
    }


def is_torch_module_name(module_name: object) -> bool:
    """True for the name of a Python module of torch."""
    return package_of(module_name) == "torch"
