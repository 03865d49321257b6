"""`StoreWriter`: stores the values that the model's own forward would store.

See `remat.frontend.capture.model.stores`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.documents.program import Program
from remat.documents.records import Store
from remat.documents.structure import Structure
from remat.errors import DocumentError, GuardError
from remat.frontend.capture.model.values import (
    MODULE_TABLES,
    has_items,
    path_label,
    value_at_place,
)
from remat.frontend.common.pytree import unflattener

_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that every module has. A program must set neither them nor anything in them."""


class StoreWriter:
    """Writes the values that a program stores at each call, into one model and into the call's
    arguments."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._model = model
        self._stores = [
            (store, unflattener(_with_inputs_after(store.value, len(program.outputs))))
            for store in program.stores
        ]
        for store in program.stores:
            _check_store(store, model)

    def write(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], arguments: Any
    ) -> None:
        """Store the values of one call with these `outputs`. `arguments` is the pair (args, kwargs)
        of the call, and `inputs` are its tensors."""
        leaves = [*outputs, *inputs] if self._stores else ()
        for store, build in self._stores:
            root = arguments
            steps = store.place
            if store.kind == "attribute":
                root, steps = self._model.get_submodule(str(steps[0])), steps[1:]
            try:
                _write_store(root, steps, build(leaves), store.is_content)
            except (LookupError, AttributeError, TypeError) as error:
                raise GuardError(
                    f"the planned step sets {path_label(store.place)}, and what contains it was "
                    f"removed or replaced ({error}). Replan: remat.disable, then remat.enable"
                ) from error


def _with_inputs_after(value: Structure, output_count: int) -> Structure:
    """Return the structure of a stored value with input number i as leaf number `output_count` + i,
    so that its leaves are numbers of outputs, then inputs."""
    if value.kind == "input":
        return Structure(kind="leaf", leaf=output_count + value.leaf)
    children = tuple(_with_inputs_after(child, output_count) for child in value.children)
    return value.model_copy(update={"children": children})


def _check_store(store: Store, model: nn.Module) -> None:
    """Raise `DocumentError` for a store that would change the parameters, buffers, submodules,
    hooks or methods of a module."""
    is_refused = not _OWN_ATTRIBUTES.isdisjoint(store.place)
    if store.kind == "attribute" and not is_refused:
        module, steps = model.get_submodule(str(store.place[0])), store.place[1:]
        try:
            owner = value_at_place(module, steps if store.is_content else steps[:-1])
        except (LookupError, AttributeError, TypeError):
            return  # `write` reports it
        if store.is_content:
            is_refused = isinstance(owner, (nn.Module, torch.Tensor))
        else:
            is_refused = isinstance(owner, nn.Module) and _is_member(owner, str(steps[-1]))
    if is_refused:
        raise DocumentError(f"a program must not set {path_label(store.place)} of a model")


def _is_member(module: nn.Module, name: str) -> bool:
    """True if `name` is a method, parameter, buffer or submodule of a module."""
    is_method = callable(getattr(type(module), name, None))
    return is_method or any(name in vars(module)[table] for table in MODULE_TABLES)


def _write_store(root: Any, steps: tuple[str | int, ...], value: Any, is_content: bool) -> None:
    """Write a value at the place `steps` below `root`; with `is_content`, into the object there."""
    owner = value_at_place(root, steps if is_content else steps[:-1])
    if is_content:
        _replace_items(owner, value)
    elif has_items(owner):
        owner[steps[-1]] = value
    else:
        vars(owner)[steps[-1]] = value


def _replace_items(owner: Any, value: Any) -> None:
    """Replace the items of a container by the items of `value`, or set the attributes of an object
    that `value` has."""
    if isinstance(owner, list):
        owner[:] = value
    elif isinstance(owner, deque):
        owner.clear()
        owner.extend(value)
    elif isinstance(owner, MutableMapping):
        owner.clear()
        owner.update(value)
    else:
        for name, item in vars(value).items():
            object.__setattr__(owner, name, item)
