"""`PythonState`: a snapshot of the Python values that a model's code can change.

A capture, a dry run and a recomputation run a forward once more than the training loop does. They
must not change counters, lists and attributes. And a forward that changes such values may run
differently in the next call.

The snapshot has the attributes of modules and of their parameters, the class attributes of the
modules' classes, the objects and containers in them, the variables of closures and hooks, and the
global variables that the model's code names.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from remat.frontend.capture.model.named_state import (
    class_data,
    functions_of,
    is_of_torch,
    is_searched,
    model_functions,
    named_globals,
    user_classes,
)
from remat.frontend.capture.model.preserved_state import is_of_capture, is_same_scalar

_OBJECT_DEPTH = 3
"""The depth of the search through objects: from a module to its cache, to a layer of the cache."""

_MAX_SEARCHED_ITEMS = 10_000
"""Containers with more items are compared and restored; their items are not searched."""

_MAX_ARRAY_BYTES = 1 << 20
"""Larger NumPy arrays are not copied, so writes into them are neither detected nor restored."""

_OPAQUE = (
    bool, int, float, str, bytes, type(None), type, torch.Tensor, torch.dtype, torch.device,
    ModuleType,
)  # fmt: skip
"""Types whose attributes are not searched."""

_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that have its tensors and submodules."""


class _Absent:
    """The class of `ABSENT`."""

    def __repr__(self) -> str:
        return "absent"


_SHARED_GENERATORS = (random.random.__self__, np.random.random.__self__)  # type: ignore[attr-defined]
"""The global generators of Python and NumPy. Callers restore them separately."""

GENERATORS = random.Random, np.random.RandomState, np.random.Generator
"""The classes of the random generators of Python and NumPy."""

ABSENT = _Absent()
"""The value of an attribute or item that does not exist."""

Path = tuple[str | int | None, ...]
"""The place of a value: the path of a module (None for a variable outside of modules), then names
of attributes and keys of containers."""


class Change(NamedTuple):
    """A changed value: its place, the value before, and the value now. `key` is its name or key in
    `container`; None if the container is compared as a whole (list, deque, set, array, RNG)."""

    path: Path
    container: Any
    key: Any
    before: Any
    now: Any


class PythonState:
    """A snapshot of the Python values that a model can change, and of the containers in the
    `arguments` of a call. With the model's `hooks`, also of the values that these can change."""

    def __init__(self, model: nn.Module, arguments: Any = (), hooks: Sequence[Any] = ()) -> None:
        self._tables: list[_Table] = []
        self._seen: dict[int, Any] = {id(item): item for item in _SHARED_GENERATORS}
        """The searched objects by `id`. The reference keeps the `id` unique."""
        self._seen |= {id(module): module for module in model.modules()}
        for name, module in model.named_modules():
            attributes = vars(module)
            ignored = _MODULE_TABLES
            if is_of_torch(type(module).__module__):  # private attributes of torch's modules
                ignored += tuple(key for key in attributes if key.startswith("_"))
            self._add_attributes((name,), attributes, _OBJECT_DEPTH, ignored)
            for key in _MODULE_TABLES:
                table = attributes[key]
                self._tables.append(
                    _Table((name, key), table, list, partial(_write_keys, dict(table)))
                )
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and id(tensor) not in self._seen:
                        self._seen[id(tensor)] = tensor
                        self._add_attributes((name, key), vars(tensor), 1)
        for function in model_functions(model):
            self._add_function((None, function.__qualname__), function, 1)
        for cls in user_classes(model):
            self._tables.append(_Table((None, cls.__qualname__), cls, class_data, _write_class))
            self._add_items((None, cls.__qualname__), class_data(cls).items(), 1)
        self._add_globals(model_functions(model), 0)
        self._add_items((None, "arguments"), [("", arguments)], _OBJECT_DEPTH)
        self._add_hooks(hooks)

    @classmethod
    def of_hooks(cls, hooks: Sequence[Any], model: nn.Module) -> PythonState:
        """Return a snapshot of the values that hooks of a model can change, such as closure and
        global variables and the attributes of their objects, without those of the model."""
        state = cls(model)
        state._tables.clear()
        state._add_hooks(hooks)
        return state

    def changes(self) -> list[Change]:
        """Return the values that have changed since the snapshot."""
        return [change for table in self._tables for change in table.changes()]

    def restore(self) -> None:
        """Restore all values and the contents of all containers."""
        for table in self._tables:
            if table.changes():
                table.write(table.container, table.before)

    def remove_tensors_of_capture(self) -> None:
        """Restore the values that contain tensors or symbols of a capture, which are invalid after
        it. Other values stay as they are, except in containers that are compared as a whole."""
        for table in self._tables:
            changes = table.changes()
            of_capture = [change for change in changes if contains_capture(change.now)]
            if of_capture and isinstance(table.before, dict):
                now = {change.key: change.now for change in changes if change not in of_capture}
                table.write(table.container, _with_changes(table.before, now))
            elif of_capture:
                table.write(table.container, table.before)

    # -- the search -------------------------------------------------------------------------

    def _add_hooks(self, hooks: Sequence[Any]) -> None:
        for hook in hooks:
            label = getattr(hook, "__qualname__", type(hook).__qualname__)
            self._add_items((None,), [(label, hook)], _OBJECT_DEPTH)
        functions = [function for hook in hooks for function in functions_of(hook)]
        self._add_globals(functions, _OBJECT_DEPTH)

    def _add_globals(self, functions: Iterable[FunctionType], depth: int) -> None:
        """Search the global variables that the code of functions can refer to."""
        for namespace, names in named_globals(functions):
            path = None, str(namespace.get("__name__", ""))
            read = partial(_read_names, names)
            self._tables.append(_Table(path, namespace, read, partial(_write_names, names)))
            self._add_items(path, read(namespace).items(), depth)

    def _add_attributes(
        self, path: Path, attributes: dict[str, Any], depth: int, ignored: tuple[str, ...] = ()
    ) -> None:
        self._seen[id(attributes)] = attributes
        read, write = partial(_read_dict, ignored), partial(_write_dict, ignored)
        self._tables.append(_Table(path, attributes, read, write))
        self._add_items(path, read(attributes).items(), depth)

    def _add_items(self, path: Path, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        for key, value in items:
            if not isinstance(value, _OPAQUE) and id(value) not in self._seen:
                self._seen[id(value)] = value
                step = key if isinstance(key, (str, int)) else repr(key)
                self._add_value((*path, step), value, depth)

    def _add_value(self, path: Path, value: Any, depth: int) -> None:
        if isinstance(value, (FunctionType, MethodType, partial)):
            self._add_function(path, value, depth)
            return
        if (access := _access(value)) is not None:
            self._tables.append(_Table(path, value, *access))
        if isinstance(value, dict):
            self._add_contents(path, value, list(value.items()), depth)
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            self._add_contents(path, value, enumerate(value), depth)
        if not depth or not is_searched(value):
            return
        attributes = _dictionary(value)
        if isinstance(attributes, dict) and id(attributes) not in self._seen:
            ignored = _MODULE_TABLES if isinstance(value, nn.Module) else ()
            self._add_attributes(path, attributes, depth - 1, ignored)
        if slots := _slots(value):
            read, write = partial(_read_slots, slots), _write_attributes
            self._tables.append(_Table(path, value, read, write))
            self._add_items(path, read(value).items(), depth - 1)

    def _add_contents(
        self, path: Path, container: Any, items: Iterable[tuple[Any, Any]], depth: int
    ) -> None:
        if len(container) <= _MAX_SEARCHED_ITEMS:
            self._add_items(path, items, depth)

    def _add_function(self, path: Path, function: Any, depth: int) -> None:
        """Search the closure variables and attributes of a function, the object of a method, and
        the arguments of a `partial`."""
        if isinstance(function, partial):
            self._add_items(path, enumerate((function.func, *function.args)), depth)
            self._add_items(path, function.keywords.items(), depth)
            return
        if isinstance(function, MethodType):
            self._add_items(path, [("__self__", function.__self__)], depth)
            function = function.__func__
            if not isinstance(function, FunctionType):
                return
        if function.__dict__:
            self._add_attributes(path, function.__dict__, 0)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__" and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._tables.append(_Table((*path, name), cell, _read_cell, _write_attributes))
                self._add_items(path, ((name, v) for v in _read_cell(cell).values()), depth)


class _Table:
    """A container or object with its state at the time of the snapshot. `read` returns a copy of
    the state: a dictionary, a list, or another value (for an RNG, say). `write` restores it."""

    def __init__(
        self,
        path: Path,
        container: Any,
        read: Callable[[Any], Any],
        write: Callable[[Any, Any], None],
    ) -> None:
        self.path = path
        self.container = container
        self.write = write
        self.before = read(container)
        self._read = read

    def changes(self) -> list[Change]:
        """Return the values that have changed since the snapshot."""
        before, now = self.before, self._read(self.container)
        if not isinstance(before, dict):
            if _is_same_state(before, now):
                return []
            return [Change(self.path, self.container, None, before, now)]
        if len(before) == len(now) and all(map(is_, before.values(), now.values())):
            return []
        return [
            Change((*self.path, key), self.container, key, *values)
            for key in dict.fromkeys((*before, *now))
            for values in [(before.get(key, ABSENT), now.get(key, ABSENT))]
            if not _is_same(*values)
        ]


def contains_capture(value: Any, depth: int = _OBJECT_DEPTH) -> bool:
    """True if a value is a tensor or symbol of a capture, or contains one."""
    if isinstance(value, _OPAQUE):
        return is_of_capture(value)
    if is_of_capture(value):
        return True
    items: list[Any] = []
    if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
        items += value.values() if isinstance(value, dict) else value
    if depth and isinstance(attributes := _dictionary(value), dict):
        items += attributes.values()
    return any(contains_capture(item, depth - 1) for item in items) if depth >= 0 else False


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


def _is_same(a: Any, b: Any) -> bool:
    return a is b or is_same_scalar(a, b)


def _is_same_state(a: Any, b: Any) -> bool:
    """True if two states that are not dictionaries are the same."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, (np.ndarray, torch.Tensor)):
        return bool((a == b).all())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_is_same_state, a, b))
    return bool(a == b)


def _with_changes(before: dict[Any, Any], changes: dict[Any, Any]) -> dict[Any, Any]:
    values = {**before, **changes}
    return {key: value for key, value in values.items() if value is not ABSENT}


# -- reading and restoring ------------------------------------------------------------------


def _read_dict(ignored: tuple[str, ...], container: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in container.items() if key not in ignored}


def _write_dict(ignored: tuple[str, ...], container: Any, state: dict[Any, Any]) -> None:
    state = {**state, **{key: container[key] for key in ignored if key in container}}
    container.clear()
    container.update(state)


def _write_keys(before: dict[str, Any], table: dict[str, Any], keys: list[str]) -> None:
    """Restore the names of a module's tensors or submodules. Present ones are not replaced."""
    state = {key: table.get(key, before[key]) for key in keys}
    table.clear()
    table.update(state)


def _write_list(container: Any, state: list[Any]) -> None:
    container.clear()
    is_ordered = isinstance(container, (list, deque))
    getattr(container, "extend" if is_ordered else "update")(state)


def _read_names(names: set[str], namespace: dict[str, Any]) -> dict[str, Any]:
    return {name: namespace[name] for name in names if name in namespace}


def _write_names(names: set[str], namespace: dict[str, Any], state: dict[str, Any]) -> None:
    for name in names - state.keys():
        namespace.pop(name, None)
    namespace.update(state)


def _read_slots(names: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {name: v for name in names if (v := _attribute(value, name)) is not ABSENT}


def _read_cell(cell: Any) -> dict[str, Any]:
    return _read_slots(("cell_contents",), cell)


def _write_attributes(owner: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(owner, name, value)


def _write_class(cls: type, state: dict[str, Any]) -> None:
    now = class_data(cls)
    for name in now.keys() - state.keys():
        type.__delattr__(cls, name)
    for name, value in state.items():
        if now.get(name, ABSENT) is not value:
            type.__setattr__(cls, name, value)


def _write_array(array: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> None:
    array[...] = state


def _write_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _access(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """Return the functions that read and restore the state of an object; None if its attributes are
    its only state."""
    match value:
        case dict():
            return partial(_read_dict, ()), partial(_write_dict, ())
        case list() | deque() | set():
            return list, _write_list
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
            return torch.Generator.get_state, _write_generator
        case np.ndarray() if value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject:
            return np.ndarray.copy, _write_array
    return None


def _dictionary(value: object) -> Any:
    """Return the `__dict__` of an object; None if it has none, or reading it fails."""
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # a proxy whose target does not exist
        return None


def _slots(value: object) -> tuple[str, ...]:
    """Return the names of the slots of an object's class."""
    names: list[str] = []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _attribute(value: object, name: str) -> Any:
    """Return an attribute of an object; `ABSENT` if it does not exist, or reading it fails."""
    try:
        return getattr(value, name, ABSENT)
    except Exception:  # a property of a proxy
        return ABSENT
