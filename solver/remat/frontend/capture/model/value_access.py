"""Reading and restoring the state of a Python value: a container, an array, a random generator, a
stream in memory, an iterator."""

from __future__ import annotations

import array
import ast
import copy
import io
import itertools
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from remat.frontend.capture.model.reached_code import class_data_attributes
from remat.frontend.capture.model.values import ABSENT, attribute_or_absent

MAX_SEARCHED_ITEMS = 10_000
"""Containers with more items are compared and restored; their items are not searched."""

_MAX_ARRAY_BYTES = 64 << 20
"""Larger NumPy arrays are not copied, so writes into them are neither detected nor restored."""

StateAccess = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]
"""The functions that read and restore the state of an object."""


def state_access_of(value: Any) -> StateAccess | None:
    """Return the functions that read and restore the state of an object, such as the items of a
    list or the state of a generator; None if it has no state but attributes, or is a NumPy array
    that is too large to copy. Iterators have `iterator_state` instead."""
    match value:
        case dict():
            return partial(read_dict, ()), partial(restore_dict, ())
        case list() | deque() | set():
            return list, _restore_list
        case bytearray() | array.array():
            return bytes, _restore_bytes
        case io.StringIO() | io.BytesIO():
            return _read_stream, _restore_stream
        case random.Random():
            return random.Random.getstate, random.Random.setstate
        case np.random.RandomState():
            return np.random.RandomState.get_state, np.random.RandomState.set_state
        case np.random.Generator():
            return (
                lambda generator: pickle.dumps(generator.bit_generator.state),
                lambda generator, state: setattr(
                    generator.bit_generator, "state", pickle.loads(state)
                ),
            )
        case torch.Generator():
            return torch.Generator.get_state, _restore_generator
        case np.ndarray() if value.dtype.hasobject:
            is_small = value.size <= MAX_SEARCHED_ITEMS
            return (_read_object_array, _restore_object_array) if is_small else None
        case np.ndarray() if value.nbytes <= _MAX_ARRAY_BYTES:
            return np.ndarray.copy, _restore_array
    return None


# -- dictionaries, attributes, variables ----------------------------------------------------


def read_dict(ignored: tuple[str, ...], container: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dictionary without the keys `ignored`."""
    return {key: value for key, value in container.items() if key not in ignored}


def restore_dict(ignored: tuple[str, ...], container: Any, state: dict[Any, Any]) -> None:
    """Give a dictionary the items of `state`, except for the keys `ignored`."""
    state = {**state, **{key: container[key] for key in ignored if key in container}}
    container.clear()
    container.update(state)


def restore_table(before: dict[str, Any], table: dict[str, Any], keys: list[str]) -> None:
    """Restore the keys of a module's table of tensors or submodules. A present value is not
    replaced; an absent one is taken from `before`."""
    state = {key: table.get(key, before[key]) for key in keys}
    table.clear()
    table.update(state)


def read_variables(names: set[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the variables `names` of a namespace; those that it has."""
    return {name: namespace[name] for name in names if name in namespace}


def restore_variables(names: set[str], namespace: dict[str, Any], state: dict[str, Any]) -> None:
    """Restore the variables `names` of a namespace, and delete those without a value in `state`."""
    for name in names - state.keys():
        namespace.pop(name, None)
    namespace.update(state)


def read_attributes(names: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the attributes `names` of an object; those that it has."""
    return {name: v for name in names if (v := attribute_or_absent(value, name)) is not ABSENT}


def read_cell(cell: Any) -> dict[str, Any]:
    """Return the value of a closure's cell as a dictionary, which is empty for an empty cell."""
    return read_attributes(("cell_contents",), cell)


def restore_attributes(owner: Any, state: dict[str, Any]) -> None:
    """Set the attributes in `state`; others stay."""
    for name, value in state.items():
        object.__setattr__(owner, name, value)


def restore_class(cls: type, state: dict[str, Any]) -> None:
    """Restore the data attributes of a class, and delete new ones."""
    now = class_data_attributes(cls)
    for name in now.keys() - state.keys():
        type.__delattr__(cls, name)
    for name, value in state.items():
        if now.get(name, ABSENT) is not value:
            type.__setattr__(cls, name, value)


# -- sequences, arrays, generators, streams -------------------------------------------------


def _restore_list(container: Any, state: list[Any]) -> None:
    container.clear()
    is_ordered = isinstance(container, (list, deque))
    getattr(container, "extend" if is_ordered else "update")(state)


def _restore_bytes(container: Any, state: bytes) -> None:
    if isinstance(container, bytearray):
        container[:] = state
    else:
        del container[:]
        container.frombytes(state)


def _read_object_array(values: np.ndarray[Any, Any]) -> list[Any]:
    return list(values.flat)


def _restore_object_array(values: np.ndarray[Any, Any], state: list[Any]) -> None:
    for index, item in enumerate(state):
        values.flat[index] = item


def _restore_array(values: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> None:
    values[...] = state


def _restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _read_stream(stream: Any) -> tuple[Any, int] | None:
    return None if stream.closed else (stream.getvalue(), stream.tell())


def _restore_stream(stream: Any, state: tuple[Any, int] | None) -> None:
    if state is not None and not stream.closed:
        stream.seek(0)
        stream.truncate()
        stream.write(state[0])
        stream.seek(state[1])


# -- iterators ------------------------------------------------------------------------------


def is_iterator(value: object) -> bool:
    """True for an iterator of Python itself, such as `itertools.count`. (Others have attributes.)
    False for generators, which cannot be copied."""
    is_builtin = type(value).__module__ in ("builtins", "itertools")
    return is_builtin and isinstance(value, Iterator) and not isinstance(value, GeneratorType)


def iterator_state(iterator: Any) -> Any:
    """Return the position of an iterator as values that can be compared, without advancing it; None
    if Python cannot copy such iterators."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = iterator.__reduce__()
    except TypeError:
        return None
    return tuple(map(_state_of_reduced_item, reduced)) if isinstance(reduced, tuple) else None


def _state_of_reduced_item(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(map(_state_of_reduced_item, part))
    if is_iterator(part):
        return iterator_state(part)
    if isinstance(part, list):
        items = part[:MAX_SEARCHED_ITEMS]
        return len(part), *(iterator_state(item) for item in items if is_iterator(item))
    return part


def copy_of_iterator(iterator: Any) -> Any:
    """Return a copy of an iterator at its present position, without advancing it. The elements are
    not copied. None if Python cannot copy such iterators."""
    if isinstance(iterator, itertools.count):
        return _copy_of_count_iterator(iterator)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            function, arguments, *rest = iterator.__reduce__()
            result = function(*map(_copy_of_reduced_item, arguments))
            if rest and rest[0] is not None:
                result.__setstate__(_copy_of_iterator_state(rest[0]))
    except TypeError:
        return None
    return result


def _copy_of_count_iterator(iterator: itertools.count[Any]) -> itertools.count[Any] | None:
    text = repr(iterator).removeprefix("count(").removesuffix(")")
    try:
        return itertools.count(*ast.literal_eval(f"({text},)"))
    except (SyntaxError, ValueError):  # it counts other values than numbers
        try:
            return copy.copy(iterator)
        except TypeError:
            return None


def _copy_of_reduced_item(part: Any) -> Any:
    if isinstance(part, (tuple, list)) and any(map(is_iterator, part[:MAX_SEARCHED_ITEMS])):
        return type(part)(map(_copy_of_reduced_item, part))
    return copy_of_iterator(part) if is_iterator(part) else part


def _copy_of_iterator_state(state: Any) -> Any:
    """Return a copy of the argument of an iterator's `__setstate__`, with copies of lists:
    `itertools.cycle` appends to one."""
    if isinstance(state, tuple):
        return tuple(map(_copy_of_iterator_state, state))
    return list(state) if isinstance(state, list) else _copy_of_reduced_item(state)
