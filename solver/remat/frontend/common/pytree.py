"""Take tensors out of a model's arguments and outputs, and put them back.

Own code rather than `torch.utils._pytree`, because plain dataclasses need no registration here and
because a `Structure` must be safe to read from a document: a type is looked up only in modules that
are already imported, and must be a dataclass, a named tuple or a dict.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from remat.documents.structure import Structure
from remat.errors import DocumentError, TraceError

CACHE_REMEDY = "pass use_cache=False (or set model.config.use_cache = False)"


def flatten(tree: object, what: str) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of `tree`, each once, and the Structure that holds their numbers.

    `what` names the tree in errors ("the model's output"). Raises `TraceError` for objects that
    cannot be described by data.
    """
    walker = _Walker(what)
    structure = walker.walk(tree, "")
    return walker.leaves, structure


class _Walker:
    """Functions inside of `flatten` that call each other would be garbage for the collector, which
    holds the tensors until it comes by."""

    def __init__(self, what: str) -> None:
        self.leaves: list[torch.Tensor] = []
        self._what = what
        self._seen: dict[int, int] = {}

    def walk(self, node: object, path: str) -> Structure:
        """The structure of a part of the tree, whose tensors are among the leaves afterwards."""
        if isinstance(node, torch.Tensor):
            if id(node) not in self._seen:
                self._seen[id(node)] = len(self.leaves)
                self.leaves.append(node)
            return Structure(kind="leaf", leaf=self._seen[id(node)])
        if node is None or isinstance(node, (bool, int, float, str, complex)):
            return Structure(kind="value", value=_plain(node))
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return Structure(
                kind="namedtuple", type=_type_name(node), children=self._items(node, path)
            )
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return self._object(node, path)
        if isinstance(node, (list, tuple)) and type(node) in (list, tuple, torch.Size):
            kind = "list" if isinstance(node, list) else "tuple"
            return Structure(kind=kind, children=self._items(node, path))
        if isinstance(node, Mapping):
            if not all(isinstance(key, (str, int)) for key in node):
                raise TraceError(
                    f"{self._what}{path}: only strings and integers can be keys of a dict"
                )
            children = tuple(self.walk(item, f"{path}[{key!r}]") for key, item in node.items())
            kind = "" if type(node) in (dict, defaultdict) else _type_name(node)
            return Structure(kind="dict", type=kind, keys=tuple(node), children=children)
        remedy = (
            CACHE_REMEDY
            if "cache" in type(node).__name__.lower()
            else "use tensors, numbers, strings, and lists, tuples, dicts or dataclasses of them"
        )
        raise TraceError(
            f"{self._what}{path} is a {type(node).__name__}, which cannot be traced; {remedy}"
        )

    def _items(self, node: Sequence[object], path: str) -> tuple[Structure, ...]:
        return tuple(self.walk(item, f"{path}[{i}]") for i, item in enumerate(node))

    def _object(self, node: Any, path: str) -> Structure:
        # Hugging Face's ModelOutput leaves absent fields None: leave them out, as it does itself.
        fields = [f for f in dataclasses.fields(node) if f.init]
        kept = [
            f.name for f in fields if getattr(node, f.name) is not None or f.default is not None
        ]
        children = tuple(self.walk(getattr(node, n), f"{path}.{n}") for n in kept)
        return Structure(kind="object", type=_type_name(node), keys=tuple(kept), children=children)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What `split` took the leaves out of: containers that torch knows, and in their places,
    dataclasses with tensors in them that it does not."""

    spec: TreeSpec
    objects: tuple[tuple[type, tuple[str, ...], Shape] | None, ...]

    @property
    def count(self) -> int:
        """Of leaves."""
        return sum(1 if found is None else found[2].count for found in self.objects)


def split(tree: object) -> tuple[list[Any], Shape]:
    """Whatever is in lists, tuples, dicts and dataclasses, and the shape of these: unlike
    `flatten`, of any objects, each as often as it is there."""
    return _split(tree, ())


def _split(tree: object, inside_of: tuple[object, ...]) -> tuple[list[Any], Shape]:
    outer, spec = tree_flatten(tree)
    leaves: list[Any] = []
    objects: list[tuple[type, tuple[str, ...], Shape] | None] = []
    for leaf in outer:
        names = () if any(leaf is each for each in inside_of) else _names(leaf)
        found = _split([getattr(leaf, name) for name in names], (*inside_of, leaf))
        if names and any(isinstance(item, torch.Tensor) for item in found[0]):
            leaves += found[0]
            objects.append((type(leaf), names, found[1]))
        else:
            leaves.append(leaf)
            objects.append(None)
    return leaves, Shape(spec, tuple(objects))


def _names(item: object) -> tuple[str, ...]:
    """What is set in a dataclass."""
    if not dataclasses.is_dataclass(item) or isinstance(item, type | torch.nn.Module):
        return ()
    fields = [f.name for f in dataclasses.fields(item) if hasattr(item, f.name)]
    return tuple(dict.fromkeys([*fields, *getattr(item, "__dict__", ())]))


def joined(leaves: Sequence[Any], shape: Shape) -> Any:
    """The inverse of `split`."""
    rest = iter(leaves)
    outer: list[Any] = []
    for found in shape.objects:
        if found is None:
            outer.append(next(rest))
            continue
        cls, names, inner = found
        made = object.__new__(cls)
        for name, item in zip(names, joined(list(islice(rest, inner.count)), inner), strict=True):
            object.__setattr__(made, name, item)  # frozen ones as well
        outer.append(made)
    return tree_unflatten(outer, shape.spec)


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors anywhere in it, whatever else is there."""
    return [leaf for leaf in split(tree)[0] if isinstance(leaf, torch.Tensor)]


def unflatten(structure: Structure, leaves: Sequence[object]) -> Any:
    """The inverse of `flatten`. Raises `DocumentError` for a type that is not there."""
    return builder(structure)(leaves)


def builder(structure: Structure) -> Callable[[Sequence[object]], Any]:
    """A function that rebuilds the tree from its leaves; types are resolved once, here."""
    match structure.kind:
        case "leaf":
            number = structure.leaf
            return lambda leaves: leaves[number]
        case "value":
            value = structure.value
            return lambda leaves: value
    parts = [builder(child) for child in structure.children]
    keys = structure.keys
    match structure.kind:
        case "list":
            return lambda leaves: [part(leaves) for part in parts]
        case "tuple":
            return lambda leaves: tuple(part(leaves) for part in parts)
        case "namedtuple":
            cls = _resolve(structure.type)
            return lambda leaves: cls(*(part(leaves) for part in parts))
        case "object":
            cls = _resolve(structure.type)
            return lambda leaves: cls(
                **{str(k): part(leaves) for k, part in zip(keys, parts, strict=True)}
            )
        case _:
            make = _resolve(structure.type) if structure.type else dict
            return lambda leaves: make(
                {k: part(leaves) for k, part in zip(keys, parts, strict=True)}
            )


def _plain(value: Any) -> Any:
    """Without a class of its own: NumPy's floats are floats."""
    kinds: tuple[Any, ...] = (float, complex, str)
    kind = next((k for k in kinds if isinstance(value, k)), None)
    return value if kind is None or type(value) is kind else kind(value)


def _type_name(node: object) -> str:
    return f"{type(node).__module__}:{type(node).__qualname__}"


def _resolve(name: str) -> Callable[..., Any]:
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None) if not part.startswith("__") else None
    plain = isinstance(found, type) and (
        dataclasses.is_dataclass(found)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
        or issubclass(found, dict)
    )
    if not plain:
        raise DocumentError(
            f"the output type {name[:200]} is not a dataclass, named tuple or dict of a module "
            "that is imported; import the model's package before lowering its program"
        )
    return found
