"""Python values in a form that guards can compare, store and pickle."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

Comparable = Any
"""A result of `comparable`, which can be compared by `==`, hashed and pickled."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

MAX_ITEMS = 1_000
"""The largest list, tuple or dict whose items are compared. If larger, the length is compared."""

_MAX_ARRAY_BYTES = 1 << 16


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
    if isinstance(value, np.ndarray) and value.nbytes <= _MAX_ARRAY_BYTES:
        return kind, value.shape, str(value.dtype), value.tobytes()
    if is_container(value) and with_items:
        if isinstance(value, (set, frozenset)):
            return kind, len(value), frozenset(map(comparable, filter(is_plain, value)))
        return kind, len(value), tuple(_compared_items(items_of(value)))
    return (kind,)


def _compared_items(items: Iterable[tuple[Any, Any]]) -> Iterator[Comparable]:
    for key, item in items:
        yield comparable(key, with_items=False), comparable(item, with_items=False)
