"""`PythonState`: a snapshot of the Python values that a model's code can change.

A capture, a dry run and a recomputation run a forward once more than the training loop does. They
must not change counters, lists and attributes. And a forward that changes such values may run
differently in the next call.

The snapshot has the attributes of modules and of their parameters, the class attributes of the
modules' classes, the objects and containers in them, the variables of closures and hooks, and the
global variables that the model's code names.
"""

from __future__ import annotations

import random
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from remat.frontend.capture.model.preserved_state import is_capture_value
from remat.frontend.capture.model.reached_code import (
    Namespace,
    ReachedCode,
    class_data_attributes,
    closure_cells_of,
    functions_of_class,
    is_framework_module,
    is_torch_module_name,
    is_user_class,
    model_functions,
    user_classes,
)
from remat.frontend.capture.model.value_access import (
    MAX_SEARCHED_ITEMS,
    copy_of_iterator,
    is_iterator,
    iterator_state,
    read_attributes,
    read_cell,
    read_dict,
    read_variables,
    restore_attributes,
    restore_class,
    restore_dict,
    restore_table,
    restore_variables,
    state_access_of,
)
from remat.frontend.capture.model.values import (
    ABSENT,
    MODULE_TABLES,
    Path,
    attributes_of,
    has_ignored_attributes,
    is_container,
    is_same_plain_value,
    slot_names,
)

_OBJECT_DEPTH = 3
"""The depth in which values are searched for tensors of a capture."""

_USER_DEPTH = 50
"""The depth of the search through objects of the model and of the user's project. `_MAX_VALUES`
limits it, too."""

_PACKAGE_DEPTH = 1
"""The depth of the search through global variables of installed packages, and their objects."""

_MAX_VALUES = 50_000
"""The search ends after so many values; the nearest ones are first."""

_OPAQUE = (
    bool, int, float, str, bytes, type(None), torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
"""Types of values without a state that a snapshot needs."""

_SHARED_GENERATORS = (random.random.__self__, np.random.random.__self__)  # type: ignore[attr-defined]
"""The global generators of Python and NumPy. Callers restore them separately."""

GENERATORS = random.Random, np.random.RandomState, np.random.Generator
"""The classes of the random generators of Python and NumPy."""


ARGUMENTS: Path = (None, "arguments", "")
"""The place of the arguments of a call."""


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
        self._tables: list[_StateSnapshot] = []
        self._iterators: list[_IteratorCopy] = []
        self._code = ReachedCode()
        self._seen: dict[int, Any] = {id(item): item for item in _SHARED_GENERATORS}
        """The searched objects by `id`. The reference keeps the `id` unique."""
        self._seen_classes: dict[int, type] = {}
        self._pending: deque[tuple[Path, Any, int]] = deque()
        """Values to be searched, with their paths and the depth of the search below them."""
        self._add_modules((), model)
        for function in model_functions(model):
            self._add_items((None,), [(function.__qualname__, function)], _USER_DEPTH)
        for cls in user_classes(model):
            self._add_class_data(cls)
        self._add_items(ARGUMENTS[:-1], [(ARGUMENTS[-1], arguments)], _USER_DEPTH)
        self._add_hooks(hooks)
        self._search()

    @classmethod
    def of_hooks(cls, hooks: Sequence[Any], model: nn.Module) -> PythonState:
        """Return a snapshot of the values outside of a model that its hooks can change: closure and
        global variables, and attributes of their objects."""
        state = cls(nn.Module())  # the search starts from the hooks only
        state._tables.clear()
        state._seen |= {id(module): module for module in model.modules()}
        state._add_hooks(hooks)
        state._search()
        return state

    def _add_hooks(self, hooks: Sequence[Any]) -> None:
        for hook in hooks:
            label = getattr(hook, "__qualname__", type(hook).__qualname__)
            self._add_items((None,), [(label, hook)], _USER_DEPTH)

    def _search(self) -> None:
        """Search the pending values, then the global variables that their code can reach."""
        while self._pending and len(self._seen) < _MAX_VALUES:
            self._add_value(*self._pending.popleft())
        for namespace in self._code.namespaces():
            read, write = (
                partial(read_variables, namespace.names),
                partial(restore_variables, namespace.names),
            )
            self._tables.append(
                _StateSnapshot((None, namespace.label), namespace.variables, read, write)
            )

    def changes(self) -> list[Change]:
        """Return the values that have changed since the snapshot."""
        changed = [item for item in self._iterators if item.has_advanced()]
        return [change for table in self._tables for change in table.changes()] + [
            Change(item.path, item.iterator, None, item.before, iterator_state(item.iterator))
            for item in changed
        ]

    def restore(self) -> None:
        """Restore all values and the contents of all containers. An iterator cannot go back: a copy
        takes its place in attributes, variables and containers."""
        copies = {id(item.iterator): item.copy for item in self._iterators if item.has_advanced()}
        for table in self._tables:
            has_iterators = bool(copies) and table.replace(copies)
            if has_iterators or table.changes():
                table.write(table.container, table.before)

    def remove_tensors_of_capture(self) -> None:
        """Restore the values that contain tensors or symbols of a capture, which are invalid after
        it. Other values stay as they are, except in containers that are compared as a whole."""
        for table in self._tables:
            changes = table.changes()
            of_capture = [change for change in changes if contains_capture_values(change.now)]
            if of_capture and isinstance(table.before, dict):
                now = {change.key: change.now for change in changes if change not in of_capture}
                table.write(table.container, _state_with_changes(table.before, now))
            elif of_capture:
                table.write(table.container, table.before)

    # -- the search -------------------------------------------------------------------------

    def _add_modules(self, path: Path, model: nn.Module) -> None:
        """Add a module and its submodules. The path of one in an attribute begins with `path`."""
        modules = [item for item in model.named_modules() if id(item[1]) not in self._seen]
        self._seen |= {id(module): module for _, module in modules}
        for name, module in modules:
            place: Path = (*path, name) if name or not path else path
            attributes = vars(module)
            ignored = MODULE_TABLES
            if is_torch_module_name(
                type(module).__module__
            ):  # private attributes of torch's modules
                ignored += tuple(key for key in attributes if key.startswith("_"))
            self._add_attributes(place, attributes, _USER_DEPTH, ignored)
            for key in MODULE_TABLES:
                table = attributes[key]
                self._tables.append(
                    _StateSnapshot((*place, key), table, list, partial(restore_table, dict(table)))
                )
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and id(tensor) not in self._seen:
                        self._seen[id(tensor)] = tensor
                        self._add_attributes((*place, key), vars(tensor), _USER_DEPTH)

    def _add_attributes(
        self, path: Path, attributes: dict[str, Any], depth: int, ignored: tuple[str, ...] = ()
    ) -> None:
        self._seen[id(attributes)] = attributes
        read, write = partial(read_dict, ignored), partial(restore_dict, ignored)
        self._tables.append(_StateSnapshot(path, attributes, read, write))
        self._add_items(path, read(attributes).items(), depth)

    def _add_items(self, path: Path, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        for key, value in items:
            if not isinstance(value, _OPAQUE) and id(value) not in self._seen:
                self._seen[id(value)] = value
                step = key if isinstance(key, (str, int)) else repr(key)
                self._pending.append(((*path, step), value, depth))

    def _add_value(self, path: Path, value: Any, depth: int) -> None:
        match value:
            case FunctionType() | MethodType() | partial():
                self._add_function(path, value, depth)
                return
            case ModuleType():
                self._add_named(self._code.add_module(value))
                return
            case type():
                self._add_class(value)
                return
            case nn.Module():
                del self._seen[id(value)]
                self._add_modules(path, value)
                self._add_class(type(value))
                return
        if isinstance(value, UserDict):  # its items are at its own place
            self._seen[id(value.data)] = value.data
            self._add_value(path, value.data, depth)
        if is_iterator(value):
            self._add_iterator(path, value)
            return
        if (access := state_access_of(value)) is not None:
            self._tables.append(_StateSnapshot(path, value, *access))
        if is_container(value) and len(value) <= MAX_SEARCHED_ITEMS:
            items = list(value.items()) if isinstance(value, Mapping) else enumerate(value)
            self._add_items(path, items, depth)
        if not depth or has_ignored_attributes(value):
            return
        self._add_class(type(value))
        attributes = attributes_of(value)
        if attributes is not None and id(attributes) not in self._seen:
            self._add_attributes(path, attributes, depth - 1)
        if slots := slot_names(value):
            read, write = partial(read_attributes, slots), restore_attributes
            self._tables.append(_StateSnapshot(path, value, read, write))
            self._add_items(path, read(value).items(), depth - 1)

    def _add_iterator(self, path: Path, iterator: Any) -> None:
        state, copy = iterator_state(iterator), copy_of_iterator(iterator)
        if state is not None and copy is not None:
            self._iterators.append(_IteratorCopy(path, iterator, state, copy))

    def _add_class(self, cls: type) -> None:
        """Add the attributes and functions of a class of the user's project, and of its bases."""
        for base in cls.__mro__:
            if id(base) not in self._seen_classes and is_user_class(base):
                self._seen_classes[id(base)] = base
                self._add_class_data(base)
                functions = ((f.__name__, f) for f in functions_of_class(base))
                self._add_items((None, base.__qualname__), functions, _USER_DEPTH)

    def _add_class_data(self, cls: type) -> None:
        path = (None, cls.__qualname__)
        self._tables.append(_StateSnapshot(path, cls, class_data_attributes, restore_class))
        self._add_items(path, class_data_attributes(cls).items(), _USER_DEPTH)

    def _add_function(self, path: Path, function: Any, depth: int) -> None:
        """Search the closure variables, attributes and default arguments of a function and the
        global variables that it names, the object of a method, and the arguments of a `partial`."""
        if isinstance(function, partial):
            self._add_items(path, enumerate((function.func, *function.args)), depth)
            self._add_items(path, function.keywords.items(), depth)
            return
        if isinstance(function, MethodType):
            self._add_items(path, [("__self__", function.__self__)], depth)
            self._add_items(path, [("__func__", function.__func__)], depth)
            return
        is_of_framework = is_framework_module(function.__globals__)
        if function.__dict__ or not is_of_framework:
            self._add_attributes(path, function.__dict__, depth)
        if not is_of_framework:
            self._add_items((*path, "__defaults__"), enumerate(function.__defaults__ or ()), depth)
            if function.__kwdefaults__:
                self._add_items(path, [("__kwdefaults__", function.__kwdefaults__)], depth)
            self._add_named(self._code.add_function(function))
        for name, cell in closure_cells_of(function).items():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._tables.append(
                    _StateSnapshot((*path, name), cell, read_cell, restore_attributes)
                )
                self._add_items(path, ((name, v) for v in read_cell(cell).values()), depth)

    def _add_named(self, named: Iterable[tuple[Namespace, str, Any]]) -> None:
        for namespace, name, value in named:
            depth = _USER_DEPTH if namespace.is_of_user else _PACKAGE_DEPTH
            self._add_items((None, namespace.label), [(name, value)], depth)


class _StateSnapshot:
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

    def replace(self, copies: Mapping[int, Any]) -> bool:
        """Replace values of the saved state by `copies`, which are by the `id` of the value. Return
        True if there was one to replace."""
        before = self.before
        if isinstance(before, dict):
            replaced = {key: copies[id(v)] for key, v in before.items() if id(v) in copies}
            self.before = {**before, **replaced}
            return bool(replaced)
        if isinstance(before, list):
            self.before = [copies.get(id(item), item) for item in before]
            return not all(map(is_, before, self.before))
        return False

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
            if not _is_same_value(*values)
        ]


def contains_capture_values(value: Any, depth: int = _OBJECT_DEPTH) -> bool:
    """True if a value is a tensor or symbol of a capture, or contains one."""
    if is_capture_value(value):
        return True
    if isinstance(value, _OPAQUE) or depth < 0:
        return False
    items: list[Any] = []
    if is_container(value):
        items += value.values() if isinstance(value, Mapping) else value
    if depth:
        items += (attributes_of(value) or {}).values()
    return any(contains_capture_values(item, depth - 1) for item in items)


class _IteratorCopy(NamedTuple):
    """An iterator with its state and a copy of it at the time of the snapshot."""

    path: Path
    iterator: Any
    before: Any
    copy: Any

    def has_advanced(self) -> bool:
        """True if the iterator is no longer where it was."""
        return not _is_same_state(self.before, iterator_state(self.iterator))


def _is_same_value(a: Any, b: Any) -> bool:
    return a is b or is_same_plain_value(a, b)


def _is_same_state(a: Any, b: Any) -> bool:
    """True if two states that are not dictionaries are the same."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same_value, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN, too
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool((a == b).all())
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same_state, a, b))
    return a is b or (type(a) is type(b) and bool(a == b))


def _state_with_changes(before: dict[Any, Any], changes: dict[Any, Any]) -> dict[Any, Any]:
    values = {**before, **changes}
    return {key: value for key, value in values.items() if value is not ABSENT}
