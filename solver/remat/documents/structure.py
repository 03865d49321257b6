"""`Structure`: how a model's arguments or outputs are nested, without the tensors (a pytree spec).

A tree of plain containers. Leaves are tensor numbers; everything else is a constant that JSON can
represent. Dataclasses, named tuples and Hugging Face's ModelOutput are stored as the name of their
type, which is looked up only in modules that are already imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, model_validator

from remat.documents.arguments import Argument, Scalar
from remat.documents.base import DottedPath, Natural, Record

MAX_DEPTH = 32

_CHILDREN_SCHEMA: dict[str, Any] = {
    "if": {"properties": {"kind": {"enum": ["leaf", "input", "value", "dropped"]}}},
    "then": {"properties": {"children": {"maxItems": 0}}},
}
"""Only containers have children."""


class Structure(Record):
    """A node of the tree, by its `kind`: tensor number `leaf` ("leaf"), input tensor number `leaf`
    of the step ("input"), the constant `value` ("value"), an output that the step does not compute
    ("dropped"; `value` is its path), or a container.

    Containers have `children`; dicts and objects also have a key for each child. `type` is the
    "module:QualName" of an object's class.
    """

    model_config = ConfigDict(json_schema_extra=_CHILDREN_SCHEMA)

    kind: Literal[
        "leaf", "input", "value", "dropped", "list", "tuple", "dict", "object", "namedtuple"
    ]
    leaf: Natural = 0
    value: Scalar = None
    type: DottedPath = ""
    keys: tuple[str | int, ...] = ()
    children: tuple[Structure, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind in ("dict", "object") and len(self.keys) != len(self.children):
            raise ValueError(f"{self.kind} has {len(self.keys)} keys, {len(self.children)} items")
        if self.kind in ("leaf", "input", "value", "dropped") and self.children:
            raise ValueError(f"a {self.kind} has no children")
        if self.depth() > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        return self

    def __eq__(self, other: object) -> bool:
        """Compare constants by type and sign as well: 1, True and 1.0 are not equal."""
        if not isinstance(other, Structure):
            return NotImplemented
        return bool(super().__eq__(other)) and repr(self.value) == repr(other.value)

    __hash__ = Record.__hash__

    def depth(self) -> int:
        """Return the number of levels of the tree, this one included."""
        return 1 + max((child.depth() for child in self.children), default=0)

    def leaves(self) -> list[int]:
        """Return the numbers of the tensors in the tree, in order of appearance."""
        if self.kind == "leaf":
            return [self.leaf]
        return [leaf for child in self.children for leaf in child.leaves()]

    def without_leaves(self, dropped: Collection[int]) -> Structure:
        """Return the tree with some tensors replaced by nodes of the kind "dropped". The other
        tensors are renumbered without gaps."""

        def renumbered(leaf: int) -> Structure:
            if leaf in dropped:
                return Structure(kind="dropped", value=self.path_of(leaf))
            return Structure(kind="leaf", leaf=leaf - sum(d < leaf for d in dropped))

        return self.with_leaves(renumbered)

    def with_leaves(self, leaf_of: Callable[[int], Structure]) -> Structure:
        """Return the tree with `leaf_of(number)` in place of each tensor."""
        if self.kind == "leaf":
            return leaf_of(self.leaf)
        if not self.children:
            return self
        children = tuple(child.with_leaves(leaf_of) for child in self.children)
        return self.model_copy(update={"children": children})

    def changed_values(
        self, before: Structure, path: tuple[str | int, ...] = ()
    ) -> Iterator[tuple[tuple[str | int, ...], Argument, Argument]]:
        """Yield (path, value before, value now) for each constant that differs from the tree
        `before`; (path, None, None) where the trees differ in more than constants."""
        same_node = (self.kind, self.type, self.keys, len(self.children)) == (
            before.kind, before.type, before.keys, len(before.children),
        )  # fmt: skip
        if not same_node:
            yield path, None, None
        elif self.kind == "value" and self != before:
            yield path, before.value, self.value
        else:
            keys = self.keys or tuple(range(len(self.children)))
            for key, child, child_before in zip(keys, self.children, before.children, strict=True):
                yield from child.changed_values(child_before, (*path, key))

    def path_of(self, leaf: int) -> str:
        """Return where a leaf is, as text for messages: `past_key_values[0][1]`, `loss`; "leaf 3"
        if it is not in the tree."""
        return _leaf_path(self, leaf, "") or f"leaf {leaf}"

    def access_of(self, leaf: int) -> str:
        """Return the code that takes a leaf from the value: `.loss`, `["loss"]`, `[0]`; "" for a
        value that is the leaf itself."""
        if self.kind == "leaf":
            return ""
        keys = self.keys or tuple(range(len(self.children)))
        key, child = next(
            (key, child)
            for key, child in zip(keys, self.children, strict=False)
            if leaf in child.leaves()
        )
        step = f".{key}" if self.kind == "object" else f"[{json.dumps(key)}]"
        return step + child.access_of(leaf)


def check_output_leaves(result: Structure, stored: Iterable[Structure], output_count: int) -> None:
    """Raise ValueError unless each output is a leaf of the result or of a stored value, and each
    leaf is an output."""
    leaves = {leaf for structure in (result, *stored) for leaf in structure.leaves()}
    if sorted(leaves) != list(range(output_count)):
        raise ValueError("the leaves of the result and of the stored values are not the outputs")


def _leaf_path(node: Structure, leaf: int, prefix: str) -> str | None:
    """Return where a leaf is, as text that begins with `prefix`; None if it is not in the tree."""
    if node.kind == "leaf":
        return (prefix or "output") if node.leaf == leaf else None
    keys = node.keys or tuple(range(len(node.children)))
    for key, child in zip(keys, node.children, strict=False):
        step = f"[{key}]" if isinstance(key, int) else (f".{key}" if prefix else key)
        if path := _leaf_path(child, leaf, prefix + step):
            return path
    return None
