"""`AttributeAccess`: the attributes that a model's code reads and writes during a recording.

A recorded step contains the attributes' values as constants: a loss weight, the `p` of a dropout,
the active adapter. A training loop may change them between steps, so the values that the code read
become guards (`attribute_guards`).

During a recording, the classes of modules, and of objects that an attribute returned, have a
`__getattribute__` that notes each read. A list or dict that an attribute returns is noted with its
content.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import nn

from remat.frontend.capture.model.preserved_state import is_capture_value
from remat.frontend.capture.model.values import (
    ABSENT,
    MODULE_TABLES,
    Comparable,
    Path,
    attributes_of,
    comparable,
    has_ignored_attributes,
    is_container,
    is_plain_value,
    items_of_container,
)
from remat.frontend.common.code_origin import is_torch_or_remat_code
from remat.frontend.common.quantized import quantization_states

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""Bits of `type.__flags__`: the class was created by Python code; the class is immutable."""

_UNGUARDED = frozenset({*nn.Module().__dict__, "forward", "_compiled_call_impl"})
"""Attributes of every module, such as `training`. Call signatures have those that matter."""


_ALL_ATTRIBUTES = frozenset({"__dict__", "__getstate__"})
"""Attributes by which code, such as `vars` and `copy.copy`, reads all attributes of an object."""


class Read(NamedTuple):
    """A read of an attribute, or of the content of a container.

    `path` is the path of the object or container. `name` is the attribute's name; None for the
    content of a container. `value` is `comparable(ABSENT)` for an attribute that did not exist.
    """

    path: Path
    name: str | None
    value: Comparable


class AttributeAccess:
    """The attributes that the code of a model reads and writes within `recorded`.

    `writes` are pairs of a module's path and an attribute's name. `reads_of_earlier_call` is the
    path of an attribute with a tensor that an earlier recorded call stored, and that this call read
    before it set the attribute; None without such an attribute.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reads: list[Read] = []
        self.writes: dict[tuple[str, str], None] = {}
        self.reads_of_earlier_call: Path | None = None
        self._paths: dict[int, tuple[Path, Any]] = {}
        """Paths and objects by `id`. The reference to the object keeps its `id` unique."""
        for name, module in model.named_modules():
            self._paths[id(module)] = (name,), module
        # A capture takes the tensors of quantized weights as inputs, like buffers.
        self._seen: set[tuple[int, str]] = {
            (id(state.owner), name)
            for state in quantization_states(model)
            for name in state.tensors()
        }
        self._thread = 0
        self._patched: dict[type, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the reads and writes of this thread within the context."""
        self._thread = threading.get_ident()
        set_attribute = nn.Module.__setattr__

        def set_and_note(module: nn.Module, name: str, value: Any) -> None:
            set_attribute(module, name, value)
            self._note_write(module, name)

        try:
            self._intercept(nn.Module)
            type.__setattr__(nn.Module, "__setattr__", set_and_note)
            yield
        finally:
            type.__setattr__(nn.Module, "__setattr__", set_attribute)
            for cls, original in self._patched.items():
                if original is None:
                    type.__delattr__(cls, "__getattribute__")
                else:
                    type.__setattr__(cls, "__getattribute__", original)
            self._patched.clear()

    def _intercept(self, cls: type) -> None:
        """Give a class a `__getattribute__` that notes each read of an attribute."""
        if cls in self._patched:
            return
        self._patched[cls] = vars(cls).get("__getattribute__")
        get: Callable[[Any, str], Any] = cls.__getattribute__  # type: ignore[assignment]

        def get_and_note(owner: Any, name: str) -> Any:
            try:
                value = get(owner, name)
            except AttributeError:
                self._note_absence(owner, name)
                raise
            if name in _ALL_ATTRIBUTES:
                self._note_all_attributes(owner, sys._getframe(1))
            else:
                self._note_read(owner, name, value)
            return value

        type.__setattr__(cls, "__getattribute__", get_and_note)

    # -- what is noted ----------------------------------------------------------------------

    def _path_to_note(self, owner: Any, name: str) -> Path | None:
        """Return the path of an attribute's owner; None if the owner has no path, another thread
        runs, or the attribute is not guarded or was noted before."""
        if threading.get_ident() != self._thread or (id(owner), name) in self._seen:
            return None
        path, item = self._paths.get(id(owner), (None, None))
        if path is None or name.startswith("__"):
            return None
        return None if isinstance(item, nn.Module) and name in _UNGUARDED else path

    def _note_read(self, owner: Any, name: str, value: Any) -> None:
        path = self._path_to_note(owner, name)
        if path is not None and _is_data_attribute(owner, name):
            self._seen.add((id(owner), name))
            self._note_value(path, name, value)

    def _note_all_attributes(self, owner: Any, frame: FrameType) -> None:
        """Note reads of all attributes but tensors, if not torch or remat reads them all."""
        if threading.get_ident() == self._thread and not is_torch_or_remat_code(
            frame.f_code.co_filename
        ):
            for name, value in (attributes_of(owner) or {}).items():
                if not isinstance(value, torch.Tensor):
                    self._note_read(owner, name, value)

    def _note_absence(self, owner: Any, name: str) -> None:
        path = self._path_to_note(owner, name)
        if path is None:
            return
        attributes = attributes_of(owner) or {}
        if not any(name in attributes.get(table, ()) for table in MODULE_TABLES):
            self._seen.add((id(owner), name))
            self.reads.append(Read(path, name, comparable(ABSENT)))

    def _note_write(self, module: nn.Module, name: str) -> None:
        if threading.get_ident() != self._thread or id(module) not in self._paths:
            return
        self._seen.add((id(module), name))  # a later read returns what was written
        if name in vars(module):
            self.writes[str(self._paths[id(module)][0][0]), name] = None

    def _note_value(self, path: Path, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if is_capture_value(value):
                self.reads_of_earlier_call = (*path, name)
            return
        if isinstance(value, nn.Module) and id(value) in self._paths:
            return
        self.reads.append(Read(path, name, comparable(value, 0)))
        self._follow((*path, name), value)

    def _follow(self, path: Path, value: Any) -> None:
        """Note the content of a container; let later reads of an object's attributes be noted. Do
        nothing for plain values, classes, tensors and objects that were followed before."""
        if isinstance(value, weakref.ref):
            value = value()  # a path leads through references; see `BoundGuards`
        if (
            is_plain_value(value)
            or isinstance(value, (type, torch.Tensor))
            or id(value) in self._paths
        ):
            return
        self._paths[id(value)] = path, value
        if is_container(value):
            self.reads.append(Read(path, None, comparable(value)))
            for key, item in items_of_container(value):
                if is_plain_value(key) or isinstance(key, tuple):
                    self._follow((*path, key), item)
        elif has_ignored_attributes(value):
            return
        elif _has_mutable_class(value):
            self._intercept(type(value))
        else:  # of a class that cannot be changed
            for name, item in (attributes_of(value) or {}).items():
                self._note_value(path, name, item)


def _is_data_attribute(owner: Any, name: str) -> bool:
    """True if an attribute is in the object's `__dict__` or slots, or is class data. False for
    methods and properties: the reads of their code are noted instead."""
    if name in (attributes_of(owner) or ()):
        return True
    for cls in type(owner).__mro__:
        if name in vars(cls):
            attribute = vars(cls)[name]
            return isinstance(attribute, MemberDescriptorType) or not hasattr(attribute, "__get__")
    return False


def _has_mutable_class(value: Any) -> bool:
    """True if Python code defined the class of an object, so that its methods can be replaced."""
    flags = type(value).__flags__
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE_TYPE
