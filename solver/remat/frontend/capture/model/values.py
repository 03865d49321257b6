"""Python values: their places in a model, kinds, and a form that guards can compare and pickle."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import weakref
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sized
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from types import FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch


class Absent:
    """The class of `ABSENT`."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()
"""The value of an attribute or item that does not exist."""

Path = tuple[Any, ...]
"""The place of a value: the path of a module (None for a variable outside of modules), then names
of attributes and keys of containers."""

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that have its tensors and submodules."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_REPRESENTED = (
    range, slice, bytearray, array.array, decimal.Decimal, fractions.Fraction,
    datetime.date, datetime.time, datetime.timedelta,
    torch.memory_format, torch.layout, torch.finfo, torch.iinfo,
)  # fmt: skip
"""Types of values that differ if, and only if, their texts differ."""

_OPAQUE_PACKAGES = frozenset(
    {
        *("torch", "remat", "asyncio", "concurrent", "io", "logging"),
        *("multiprocessing", "queue", "threading"),
    }
)
"""Packages of objects with a state that no model computes with, that other threads may change, or
that refer to the whole process."""


def path_label(path: Path) -> str:
    """Return a path as text for messages: `layers.0.cache['k']`."""
    text = ""
    for step in path:
        is_name = isinstance(step, str) and all(part.isidentifier() for part in step.split("."))
        if step is None or step == "":
            continue
        if is_name or not text:
            text += f".{step}" if text else str(step)
        else:
            text += f"[{step!r}]"
    return text


def has_items(value: object) -> bool:
    """True for a list, tuple, deque or mapping: the next step of a place is one of its keys or
    indices, and an attribute of any other object."""
    return isinstance(value, (list, tuple, deque, Mapping))


def value_at_place(value: Any, place: Path) -> Any:
    """Return what `place` leads to from `value`: each step is a key of a container, or an attribute
    of another object."""
    for step in place:
        value = value[step] if has_items(value) else getattr(value, str(step))
    return value


def package_of(module_name: object) -> str:
    """Return the first part of the name of a Python module; "" for None."""
    return str(module_name or "").split(".")[0]


def has_ignored_attributes(value: object) -> bool:
    """True for an object whose attributes are neither compared nor restored, by its package."""
    return package_of(type(value).__module__) in _OPAQUE_PACKAGES


def is_plain_value(value: object) -> bool:
    """True for numbers, strings, None, enums, dtypes and devices."""
    return isinstance(value, (*_PLAIN, enum.Enum))


def is_container(value: object) -> bool:
    """True for a list, tuple, deque, dictionary or set, and a read-only view of a dictionary."""
    return isinstance(value, (dict, list, tuple, set, frozenset, deque, MappingProxyType))


def is_same_plain_value(a: object, b: object) -> bool:
    """True for equal plain values of one type. NaN equals itself."""
    return is_plain_value(a) and comparable(a) == comparable(b)


def items_of_container(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys or indices of a container's items, with the items; nothing for a set, or for
    more than `MAX_ITEMS` items."""
    if len(container) <= MAX_ITEMS and not isinstance(container, (set, frozenset)):
        yield from container.items() if isinstance(container, Mapping) else enumerate(container)


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the `__dict__` of an object; None if it has none, or reading it fails."""
    try:
        attributes = getattr(value, "__dict__", None)
    except Exception:  # a proxy whose target does not exist
        return None
    return attributes if isinstance(attributes, dict) else None


# -- comparison -----------------------------------------------------------------------------

Comparable = Any
"""A result of `comparable`, which can be compared by `==`, hashed and pickled."""

MAX_ITEMS = 20_000
"""The largest list, tuple or dict whose items are compared. If larger, the length is compared."""

_MAX_ARRAY_BYTES = 1 << 16
"""The largest array that is compared byte by byte; larger ones are compared by a checksum."""

OBJECT_DEPTH = 8
"""The depth to which variables are compared with the objects in them."""


def slot_names(value: object) -> tuple[str, ...]:
    """Return the names of the slots of an object's class."""
    names: list[str] = []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in names if not name.startswith("__"))


def attribute_or_absent(value: object, name: str) -> Any:
    """Return an attribute as it is stored; one of the class, or that code computes, where none is
    stored. `ABSENT` if there is none, or reading it fails."""
    stored = attributes_of(value) or {}
    if name in stored:  # an object may refuse to return it, depending on the caller
        return stored[name]
    try:
        return getattr(value, name, ABSENT)
    except Exception:  # a property of a proxy
        return ABSENT


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


def comparable(value: Any, depth: int = 1, attributes: Collection[str] | None = None) -> Comparable:
    """Return a value in a form that can be compared.

    Plain values are compared by type and value, functions and classes as `Code`, arrays by content.
    Containers are compared by class, length, keys and items, down to this depth; at depth 0, and
    all other objects, by class only.

    With `attributes`, these attributes of objects are compared, too; all of them if the class finds
    attributes or items by code of its own. Tensors, modules and objects of torch are still compared
    by class, optimizers by the options of their parameter groups. At most `MAX_ITEMS` values are
    compared.
    """
    return _ComparableBuilder(attributes).build(value, depth)


def is_compared_by_class(value: Comparable) -> bool:
    """True for a result of `comparable` that has only the class of an object, not its content."""
    return isinstance(value, tuple) and len(value) == 1


class _ComparableBuilder:
    """The state of one call of `comparable`: the values that it has converted so far."""

    def __init__(self, attributes: Collection[str] | None) -> None:
        self._attributes = attributes
        self._num_left = MAX_ITEMS
        self._seen: dict[int, Any] = {}

    def build(self, value: Any, depth: int) -> Comparable:
        self._num_left -= 1
        if isinstance(value, weakref.ref):
            value = value()
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
        if isinstance(value, _REPRESENTED):
            return kind, repr(value)
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            data = value.tobytes()
            is_small = len(data) <= _MAX_ARRAY_BYTES
            return kind, value.shape, str(value.dtype), data if is_small else zlib.crc32(data)
        if isinstance(value, (partial, np.ndarray)):
            depth = max(depth, 2)  # its arguments or items always count
        if depth == 0 or id(value) in self._seen or self._num_left <= 0:
            return (kind,)
        self._seen[id(value)] = value
        if isinstance(value, (set, frozenset)):
            return kind, len(value), frozenset(self.build(v, OBJECT_DEPTH) for v in value)
        content = self._content(value)
        if content is None:
            return (kind,)
        count = len(value) if isinstance(value, Sized) else len(content)
        return kind, count, tuple((self.build(k, 0), self.build(v, depth - 1)) for k, v in content)

    def _content(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Return what a value contains, as pairs of a name and a value; None if only its class is
        compared."""
        if isinstance(value, np.ndarray):
            return list(enumerate(value.flat)) if value.size <= MAX_ITEMS else None
        if is_container(value):
            return list(items_of_container(value))
        if isinstance(value, partial):
            return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
        if self._attributes is None:
            return None
        if isinstance(value, torch.Tensor | torch.nn.Module | ModuleType):
            return None
        if isinstance(value, ContextVar):
            return [("value", value.get(None))]
        if isinstance(value, torch.optim.Optimizer):
            groups = value.param_groups
            return [("", [{k: v for k, v in g.items() if k != "params"} for g in groups])]
        return (
            None
            if has_ignored_attributes(value)
            else self._compared_attributes(value, self._attributes)
        )

    def _compared_attributes(
        self, value: Any, names: Collection[str]
    ) -> list[tuple[Any, Any]] | None:
        table = dict(attributes_of(value) or {})
        for cls in type(value).__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, MemberDescriptorType) and name in names:
                    table[name] = getattr(value, name, None)
        has_own_access = any(
            isinstance(getattr(type(value), name, None), FunctionType)
            for name in ("__getattr__", "__getattribute__", "__getitem__")
        )
        items = [(k, v) for k, v in table.items() if has_own_access or k in names]
        return sorted(items, key=itemgetter(0)) or None
