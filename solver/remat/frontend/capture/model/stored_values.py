"""The values that a model stores between calls: attributes and buffers of its modules, items of
these, and global variables that the code of its forwards names.

A forward that changes them may run differently in the next call.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from remat.frontend.capture.model.preserved_state import is_of_capture, is_same_scalar

_OBJECT_DEPTH = 3
"""How many objects deep the search goes: from a module to its cache, say, and to a layer of it."""

_OPAQUE = (
    bool, int, float, str, bytes, type(None), type, torch.Tensor, torch.dtype, torch.device,
    nn.Module, FunctionType, MethodType, ModuleType,
)  # fmt: skip
"""Types of values that are compared as a whole. Every module is searched separately."""

_ABSENT = object()


class StoredValues:
    """The values that a model stores, when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[tuple[int, object], Any] = {}
        """Each value by the identity of what contains it, and its key there. The container is a
        value itself, so nothing else gets its identity."""
        self._containers: list[tuple[Any, Any]] = []
        """Each dictionary, list, deque and set, with a copy."""
        for module in model.modules():
            self._add_items(module, module.__dict__.items(), _OBJECT_DEPTH)
        self._globals = [
            (namespace, names, {name: namespace[name] for name in names if name in namespace})
            for namespace, names in _named_globals(model)
        ]
        """Global variables of each Python file: the file's, the names, and their values."""
        for namespace, _, values in self._globals:
            self._add_items(namespace, values.items(), 0)

    def have_changed(self) -> bool:
        """True if the model stores other values now."""
        now = StoredValues(self._model)._values
        return now.keys() != self._values.keys() or not all(
            value is now[key] or is_same_scalar(value, now[key])
            for key, value in self._values.items()
        )

    def remove_tensors_of_capture(self) -> None:
        """Restore the global variables that are tensors of a capture, and the contents of the
        containers that have some."""
        for namespace, names, before in self._globals:
            for name in names & namespace.keys():
                if is_of_capture(namespace[name]):
                    del namespace[name]
                    namespace.update({name: before[name]} if name in before else {})
        for container, before in self._containers:
            items = list(container.values() if isinstance(container, dict) else container)
            if any(map(is_of_capture, items)):
                container.clear()
                is_ordered = isinstance(container, (list, deque))
                getattr(container, "extend" if is_ordered else "update")(before)

    def _add_items(
        self, container: object, items: Iterable[tuple[object, Any]], depth: int
    ) -> None:
        for key, value in items:
            position = id(container), key
            if position in self._values:
                return  # this container has been searched
            self._values[position] = value
            if not isinstance(value, _OPAQUE):
                self._add_contents(value, depth)

    def _add_contents(self, value: Any, depth: int) -> None:
        attributes = _dictionary(value)
        for container in (value, attributes):
            if isinstance(container, (dict, list, deque, set)):
                self._containers.append((container, copy.copy(container)))
        if isinstance(value, dict):
            self._add_items(value, list(value.items()), depth)
        elif isinstance(value, (list, tuple, deque)):
            self._add_items(value, list(enumerate(value)), depth)
        elif isinstance(value, (set, frozenset)):
            self._add_items(value, [(item, True) for item in value], depth)
        elif depth:
            self._add_items(value, list(_attributes(value)), depth - 1)


def _named_globals(model: nn.Module) -> list[tuple[dict[str, Any], set[str]]]:
    """Return the namespaces of the Python files that the methods of all modules are in, each with
    the names that their code, and functions of these files that it names, can refer to. Torch's own
    modules store nothing there."""
    pending: list[Any] = []
    for cls in {base for module in model.modules() for base in type(module).__mro__}:
        pending += [f for f in vars(cls).values() if isinstance(f, FunctionType)]
    for module in model.modules():
        pending.append(getattr(module.forward, "__func__", module.forward))
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
        if str(namespace.get("__name__", "")).split(".")[0] == "torch":
            continue
        _, names = namespaces.setdefault(id(namespace), (namespace, set()))
        new_names = set(_names_of_code(function.__code__)) - names
        names |= new_names
        pending += [namespace[name] for name in new_names if name in namespace]
    return list(namespaces.values())


def _names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the names in the code of a function, and of those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of_code(constant)


def _dictionary(value: object) -> Any:
    """Return the attributes of an object; None if it has none, or does not give them."""
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # a proxy without the object that it stands for
        return None


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name, those in slots too."""
    names = list(_dictionary(value) or ())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        try:
            item = getattr(value, name, _ABSENT)
        except Exception:  # a property of a proxy
            continue
        if item is not _ABSENT:
            yield name, item
