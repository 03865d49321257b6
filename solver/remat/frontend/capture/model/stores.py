"""Values that a call of a model stores in attributes or in its arguments.

A forward may set an attribute of a module (`self.aux_loss = ...`), or change a list or dict among
its arguments. The recorded step has the tensors in these values as further outputs, and each
planned call stores the values (`remat.frontend.runtime.stores`). A value that differs from call to
call, such as a counter, is an error, because a plan would store the same value in each call.
"""

from __future__ import annotations

import reprlib
from collections import UserDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from remat.documents.structure import Structure
from remat.errors import TraceError
from remat.frontend.capture.model.forward_checks import rng_error
from remat.frontend.capture.model.hooks import HOOK_KINDS
from remat.frontend.capture.model.preserved_state import is_capture_value
from remat.frontend.capture.model.python_state import (
    ARGUMENTS,
    GENERATORS,
    Change,
    contains_capture_values,
)
from remat.frontend.capture.model.values import (
    ABSENT,
    is_same_plain_value,
    path_label,
    value_at_place,
)
from remat.frontend.common.pytree import flatten

_REMEDY = (
    "Remedy: do this outside of the forward; or keep the value in a buffer and change it in place; "
    "or plan the blocks, so that the code around them runs in each step: "
    'remat.enable(model, budget, scope="blocks")'
)

_HOOK_TABLES = {
    *HOOK_KINDS,
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    "_forward_hooks_always_called",
}
"""The attributes of a module in which torch registers hooks."""

_CHANGED_ARGUMENT = "an argument that the forward has changed: "

_OBJECT_DEPTH = 3


class StoredValue(NamedTuple):
    """A value that a call stored, with the `kind`, `place` and `is_content` of its `Store`."""

    kind: Literal["attribute", "argument"]
    place: tuple[str | int, ...]
    value: Any
    is_content: bool

    @property
    def label(self) -> str:
        """The beginning of an error message about this value."""
        if self.kind == "attribute":
            return f"the value that the forward stores in {path_label(self.place)}: "
        return _CHANGED_ARGUMENT


# -- attributes -----------------------------------------------------------------------------


def stored_attributes(model: nn.Module, changes: Iterable[Change]) -> list[StoredValue]:
    """Return the attributes that a call set, and the containers in attributes that it changed.
    Removed attributes and registered hooks are left out. Raises `TraceError` for a parameter or
    buffer, and for a tensor in another place, such as a global variable."""
    tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
    stored: list[StoredValue] = []
    for change in changes:
        if change.now is ABSENT:
            continue
        if id(change.now) in tensors:
            raise TraceError(
                f"the forward of {type(model).__name__} stores a parameter or buffer in "
                f"{path_label(change.path)}, which a planned step does not set; read it from the "
                "module that has it"
            )
        if not _HOOK_TABLES.isdisjoint(s for s in change.path if isinstance(s, str)):
            continue  # a hook of the first call: the captured graph has its operations
        if (place := _place_of_change(model, change)) is not None:
            stored.append(StoredValue("attribute", place, change.now, change.key is None))
        elif contains_capture_values(change.now):
            raise TraceError(
                f"the forward of {type(model).__name__} stores a tensor in "
                f"{path_label(change.path)}, which a planned step does not set. {_REMEDY}"
            )
    return stored


def check_steady_stores(
    model: nn.Module, first: Sequence[Change], second: Sequence[Change]
) -> None:
    """Raise `TraceError` if the second call of a model stores other values than the first, as with
    a counter, or uses a random generator of its own. A plan would store the same values in each
    step. The arguments are the changes of the two calls."""
    after_first = {change.path: change.now for change in first}
    for change in second:
        if isinstance(change.container, GENERATORS):
            use = f"draws random numbers of {path_label(change.path)}"
            raise TraceError(rng_error(model, use))
        if not _is_equivalent(change.now, after_first.get(change.path, change.before)):
            raise TraceError(
                f"each call of {type(model).__name__} changes {path_label(change.path)} (from "
                f"{_changed_value_text(change.before)} to {_changed_value_text(change.now)}), "
                f"which a planned step would not do. {_REMEDY}"
            )


def check_no_container_growth(model: nn.Module, changes: Iterable[Change]) -> None:
    """Raise `TraceError` if a call left a tensor in a container that it has not replaced: after the
    next call, the container would have tensors of both calls."""
    for change in changes:
        if change.key is None and contains_capture_values(change.now):
            raise TraceError(
                f"a call of {type(model).__name__} adds a tensor to {path_label(change.path)}, "
                f"which a planned step would not do. {_REMEDY}"
            )


def check_unchanged_by_backward(model: nn.Module, changes: Iterable[Change]) -> None:
    """Raise `TraceError` if the backward changed Python values, which a plan would not change."""
    for change in changes:
        if not _is_equivalent(change.now, change.before):
            raise TraceError(
                f"a hook or autograd function of {type(model).__name__} changes "
                f"{path_label(change.path)} in the backward (from "
                f"{_changed_value_text(change.before)} to {_changed_value_text(change.now)}), "
                f"which a planned step would not do. {_REMEDY}"
            )


def _place_of_change(model: nn.Module, change: Change) -> tuple[str | int, ...] | None:
    """Return the place of a changed attribute, item or container; None if it cannot be reached from
    a module of the model."""
    steps = change.path
    if any(step is None for step in steps) or (change.key is not None and steps[-1] != change.key):
        return None
    owner_steps = steps if change.key is None else steps[:-1]
    owner: Any = model.get_submodule(str(steps[0]))
    try:
        owner = value_at_place(owner, owner_steps[1:])
    except (LookupError, AttributeError, TypeError):
        return None
    container = change.container
    is_there = owner is container or getattr(owner, "__dict__", None) is container
    if not is_there or (change.key is None and not isinstance(container, (list, deque))):
        return None
    return tuple(step for step in steps if step is not None)


def _is_equivalent(a: Any, b: Any, depth: int = _OBJECT_DEPTH) -> bool:
    """True if two values are the same, where all tensors of captures count as equal. Lists, tuples
    and dicts are compared by their items, other objects by their attributes, down to `depth`."""
    if a is b or is_same_plain_value(a, b):
        return True
    if is_capture_value(a) and is_capture_value(b):
        return True
    if type(a) is not type(b) or depth < 0:
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equivalent(a[k], b[k], depth) for k in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(
            _is_equivalent(x, y, depth) for x, y in zip(a, b, strict=True)
        )
    attributes = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
    if isinstance(a, (torch.Tensor, nn.Module, type)) or not all(attributes):
        return False
    return _is_equivalent(*attributes, depth - 1)


def _changed_value_text(value: Any) -> str:
    if contains_capture_values(value):
        return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return reprlib.repr(value)


# -- arguments ------------------------------------------------------------------------------


def stored_arguments(arguments: Any, changes: Iterable[Change]) -> list[StoredValue]:
    """Return the lists, dicts and dataclasses among the arguments that a call changed, the
    outermost ones. `changes` are the changes since a snapshot of the arguments. Raises `TraceError`
    for a change that a plan cannot make."""
    places: list[tuple[str | int, ...]] = []
    for change in sorted(changes, key=lambda change: len(change.path)):
        if change.path[: len(ARGUMENTS)] != ARGUMENTS:
            continue
        owner_path = change.path if change.key is None else change.path[:-1]
        place = tuple(step for step in owner_path[len(ARGUMENTS) :] if step is not None)
        is_inside = any(place[: len(outer)] == outer for outer in places)  # and stored with it
        try:
            owner = value_at_place(arguments, place)
        except (LookupError, AttributeError, TypeError):  # removed from what contained it
            continue
        is_attribute = change.container is getattr(owner, "__dict__", None)
        if is_attribute and not _has_described_attribute(owner, change.key):
            if _is_equivalent(change.before, change.now):
                continue
            problem = "the forward changes the attribute"
            if change.now is ABSENT:
                problem = "the forward removes the attribute"
            raise TraceError(
                f"{problem} {change.key!r} of an argument of the class "
                f"{type(owner).__qualname__}, which a planned step would not do. {_REMEDY}"
            )
        if not is_inside:
            places.append(place)
    return [
        StoredValue("argument", place, value_at_place(arguments, place), True) for place in places
    ]


def _has_described_attribute(owner: Any, name: Any) -> bool:
    """True if the `Structure` of the argument `owner` has the attribute `name`, so that a planned
    step can set it."""
    if isinstance(owner, UserDict):
        return name == "data"
    _, structure = flatten(owner, _CHANGED_ARGUMENT)
    return structure.kind == "object" and name in structure.keys


# -- further outputs ------------------------------------------------------------------------


def input_leaves_marked(
    structure: Structure, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Structure:
    """Return the structure of a stored value, with nodes of the kind "input" for the leaves that
    are inputs of the step. `tensors` are the leaves of the value."""
    number_of = {id(tensor): number for number, tensor in enumerate(inputs)}

    def marked(leaf: int) -> Structure:
        number = number_of.get(id(tensors[leaf]))
        kind, number = ("leaf", leaf) if number is None else ("input", number)
        return Structure(kind=kind, leaf=number)  # type: ignore[arg-type]

    return structure.with_leaves(marked)
