"""`Structure`: the shape of a model's arguments or outputs, with its tensors taken out.

A tree of plain containers. Leaves are numbered tensors; everything else is a constant that JSON can
hold. Dataclasses, named tuples and Hugging Face's ModelOutput are named by type, and a type is only
ever looked up among modules that are already imported.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from remat.documents.arguments import Scalar
from remat.documents.base import Path_, Record

MAX_DEPTH = 32


class Structure(Record):
    """One node. `leaf` numbers a tensor; `value` is a constant; containers have `children`, and
    dicts and objects a key for each child. `type` is "module:QualName" of an object."""

    kind: Literal["leaf", "value", "list", "tuple", "dict", "object", "namedtuple"]
    leaf: int = 0
    value: Scalar = None
    type: Path_ = ""
    keys: tuple[str | int, ...] = ()
    children: tuple[Structure, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind in ("dict", "object") and len(self.keys) != len(self.children):
            raise ValueError(f"{self.kind} has {len(self.keys)} keys, {len(self.children)} items")
        if self.kind in ("leaf", "value") and self.children:
            raise ValueError(f"a {self.kind} has no children")
        if self.leaf < 0:
            raise ValueError("leaves are numbered from 0")
        if self.depth() > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        return self

    def __eq__(self, other: object) -> bool:
        """With Python's values told apart by type and sign: 1, True and 1.0 are not the same."""
        if not isinstance(other, Structure):
            return NotImplemented
        return bool(super().__eq__(other)) and repr(self.value) == repr(other.value)

    __hash__ = Record.__hash__

    def depth(self) -> int:
        """Levels below and including this one."""
        return 1 + max((child.depth() for child in self.children), default=0)

    def leaves(self) -> list[int]:
        """The leaf numbers, in order of appearance."""
        if self.kind == "leaf":
            return [self.leaf]
        return [leaf for child in self.children for leaf in child.leaves()]

    def path_of(self, leaf: int) -> str:
        """Where a leaf is, for messages: `past_key_values[0][1]`, `loss`."""
        return _path(self, leaf, "") or f"leaf {leaf}"


def _path(node: Structure, leaf: int, prefix: str) -> str | None:
    if node.kind == "leaf":
        return (prefix or "output") if node.leaf == leaf else None
    keys = node.keys or tuple(range(len(node.children)))
    for key, child in zip(keys, node.children, strict=False):
        step = f"[{key}]" if isinstance(key, int) else (f".{key}" if prefix else key)
        if found := _path(child, leaf, prefix + step):
            return found
    return None
