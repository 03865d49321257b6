"""The values that a model stores between calls: attributes and buffers of its modules, items of
these, and global variables of the Python files that its forwards are in.

A forward that changes them may run differently in the next call.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
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
        self._namespaces = [(names, dict(names)) for names in _namespaces(model)]
        """The global variables of each Python file, with a copy."""
        for names, values in self._namespaces:
            self._add_items(names, values.items(), 0)

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
        for names, before in self._namespaces:
            for name, value in list(names.items()):
                if is_of_capture(value):
                    del names[name]
                    names.update({name: before[name]} if name in before else {})
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
        attributes = getattr(value, "__dict__", None)
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


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global variables of the Python files of all forwards, decorated ones included.
    Torch's own modules store nothing there."""
    namespaces: dict[int, dict[str, Any]] = {}
    for forward in {
        getattr(module.forward, "__func__", module.forward) for module in model.modules()
    }:
        functions: list[Any] = []
        inspect.unwrap(forward, stop=functions.append)
        for function in (*functions, inspect.unwrap(forward)):
            names = getattr(function, "__globals__", {})
            if names and str(names.get("__name__", "")).split(".")[0] != "torch":
                namespaces[id(names)] = names
    return list(namespaces.values())


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name, those in slots too."""
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        if (item := getattr(value, name, _ABSENT)) is not _ABSENT:
            yield name, item
