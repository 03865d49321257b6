"""Python values in a form that guards can compare, store and pickle."""

from __future__ import annotations

import enum
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch

Comparable = Any
"""A result of `comparable`, which can be compared by `==`, hashed and pickled."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

MAX_ITEMS = 20_000
"""The largest list, tuple or dict whose items are compared. If larger, the length is compared."""

_MAX_ARRAY_BYTES = 1 << 16
"""The largest array that is compared byte by byte; larger ones are compared by a checksum."""

_MAX_DEPTH = 8
"""The depth to which `deep_comparable` compares the objects in an object."""

_OPAQUE_PACKAGES = frozenset(
    {"torch", "remat", "logging", "threading", "io", "concurrent", "asyncio"}
)
"""Packages whose objects have state of their own that no model computes with."""


class Code:
    """A function or a class. Two are equal if they are the same object. After pickling, only the
    name remains, and two are equal if their names are."""

    __slots__ = ("_item", "name")

    def __init__(self, name: str, item: object = None) -> None:
        self.name = name
        self._item = item

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Code) or self.name != other.name:
            return False
        return self._item is other._item or self._item is None or other._item is None

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name.rpartition(":")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return Code, (self.name,)

    def __deepcopy__(self, memo: object) -> Code:
        return self


def is_plain(value: object) -> bool:
    """True for numbers, strings, None, enums, dtypes and devices."""
    return isinstance(value, (*_PLAIN, enum.Enum))


def is_container(value: object) -> bool:
    """True for a list, tuple, deque, dictionary or set."""
    return isinstance(value, (dict, list, tuple, set, frozenset, deque))


def items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and items of a container; none of a set or of more than `MAX_ITEMS`."""
    if len(container) <= MAX_ITEMS and not isinstance(container, (set, frozenset)):
        yield from container.items() if isinstance(container, dict) else enumerate(container)


def comparable(value: Any, *, with_items: bool = True) -> Comparable:
    """Return a value in a form that can be compared.

    Plain values are compared by type and value, functions and classes as `Code`, small arrays by
    content, containers by class, length, keys and items, and other objects by class only. Without
    `with_items`, and as items, containers are also compared by class only.
    """
    if isinstance(value, _PLAIN):
        # Equal numbers of two types, and the two zeros, are different values.
        is_exact = type(value) in _PLAIN and not isinstance(value, (float, complex))
        return type(value).__name__, value if is_exact else repr(value)
    if isinstance(value, enum.Enum):
        return type(value).__qualname__, value.name
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        function = getattr(value, "__func__", value)  # a bound method is another one in a copy
        name = f"{getattr(function, '__module__', '')}:{function.__qualname__}"
        return Code(name, function)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = value.tobytes()
        is_small = len(content) <= _MAX_ARRAY_BYTES
        return kind, value.shape, str(value.dtype), content if is_small else zlib.crc32(content)
    if isinstance(value, partial):
        arguments = (*value.args, *value.keywords.items())
        return kind, comparable(value.func), tuple(map(comparable, arguments))
    if is_container(value) and with_items:
        if isinstance(value, (set, frozenset)):
            return kind, len(value), frozenset(map(comparable, filter(is_plain, value)))
        return kind, len(value), tuple(_compared_items(items_of(value)))
    return (kind,)


def _compared_items(items: Iterable[tuple[Any, Any]]) -> Iterator[Comparable]:
    for key, item in items:
        yield comparable(key, with_items=False), comparable(item, with_items=False)


def deep_comparable(value: Any, attributes: Collection[str]) -> Comparable:
    """Return a value with what its containers and objects contain, in a form that can be compared.

    Of objects, these `attributes` are compared; all of them if the class finds attributes or items
    by code of its own. Tensors, modules and objects of torch are compared by class only, optimizers
    by the options of their parameter groups. At most `MAX_ITEMS` values are compared.
    """
    return _Comparison(attributes).of(value, _MAX_DEPTH)


def is_by_class_only(value: Comparable) -> bool:
    """True if a result of `comparable` or `deep_comparable` has only the class of an object."""
    return isinstance(value, tuple) and len(value) == 1


class _Comparison:
    """The values within one value that were compared so far."""

    def __init__(self, attributes: Collection[str]) -> None:
        self._attributes = attributes
        self._num_left = MAX_ITEMS
        self._seen: dict[int, Any] = {}

    def of(self, value: Any, depth: int) -> Comparable:
        self._num_left -= 1
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if (
            is_plain(value)
            or isinstance(value, np.ndarray | type)
            or hasattr(value, "__qualname__")
        ):
            return comparable(value)
        if id(value) in self._seen or depth == 0 or self._num_left <= 0:
            return (kind,)
        self._seen[id(value)] = value
        content = self._content(value)
        if content is None:
            return (kind,)
        return kind, len(content), tuple((k, self.of(v, depth - 1)) for k, v in content)

    def _content(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Return what a value contains, as pairs of a name and a value; None if only its class is
        compared."""
        if isinstance(value, torch.Tensor | torch.nn.Module | ModuleType):
            return None
        if isinstance(value, set | frozenset):
            return [("", tuple(sorted(map(repr, filter(is_plain, value)))))]
        if is_container(value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return [(comparable(k, with_items=False), v) for k, v in items][: self._num_left]
        if isinstance(value, partial):
            return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        if isinstance(value, ContextVar):
            return [("value", value.get(None))]
        if isinstance(value, torch.optim.Optimizer):
            groups = value.param_groups
            return [("", [{k: v for k, v in g.items() if k != "params"} for g in groups])]
        if type(value).__module__.split(".")[0] in _OPAQUE_PACKAGES and not isinstance(
            value, threading.local
        ):
            return None
        return self._attributes_of(value)

    def _attributes_of(self, value: Any) -> list[tuple[Any, Any]] | None:
        try:
            table = dict(object.__getattribute__(value, "__dict__"))
        except Exception:  # without a dictionary, or a proxy
            table = {}
        for cls in type(value).__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, MemberDescriptorType) and name in self._attributes:
                    table[name] = getattr(value, name, None)
        has_own_access = any(
            isinstance(getattr(type(value), name, None), FunctionType)
            for name in ("__getattr__", "__getattribute__", "__getitem__")
        )
        items = [(k, v) for k, v in table.items() if has_own_access or k in self._attributes]
        return sorted(items, key=itemgetter(0)) or None
