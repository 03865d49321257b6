"""Pytrees: flatten nested arguments and outputs into lists of tensors, and rebuild them.

This is not `torch.utils._pytree`, because plain dataclasses need no registration here and because a
`Structure` must be safe to read from a document: a type is looked up only in modules that are
already imported, and must be a dataclass, a named tuple, a dict or a `UserDict`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from remat.documents.structure import Structure
from remat.errors import DocumentError, OutputNotComputed, TraceError

CACHE_REMEDY = "pass use_cache=False (or set model.config.use_cache = False)"


def flatten(tree: object, label: str) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of `tree`, each once, and the structure that has their indices.

    `label` names the tree in errors ("the model's output"). Raises `TraceError` for objects that
    cannot be described by data.
    """
    flattener = _Flattener(label)
    structure = flattener.flatten(tree, "")
    return flattener.leaves, structure


class _Flattener:
    """The recursion of `flatten`: collects the tensors of a tree.

    A class, because nested functions that call each other form a reference cycle, which would keep
    the tensors alive until the garbage collector runs.
    """

    def __init__(self, label: str) -> None:
        self.leaves: list[torch.Tensor] = []
        self._label = label
        self._leaf_indices: dict[int, int] = {}

    def flatten(self, node: object, path: str) -> Structure:
        """Return the structure of a part of the tree, and add its tensors to the leaves."""
        if isinstance(node, torch.Tensor):
            if id(node) not in self._leaf_indices:
                self._leaf_indices[id(node)] = len(self.leaves)
                self.leaves.append(node)
            return Structure(kind="leaf", leaf=self._leaf_indices[id(node)])
        if isinstance(node, int) and not -(2**63) <= node < 2**63:
            raise TraceError(
                f"{self._place(path)} is an integer of more than 64 bits, which a plan cannot "
                "store; use a float or a string"
            )
        if node is None or isinstance(node, (bool, int, float, str, complex)):
            return Structure(kind="value", value=_builtin_scalar(node))
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return Structure(
                kind="namedtuple",
                type=_type_name(node),
                children=self._child_structures(node, path),
            )
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return self._dataclass_structure(node, path)
        if isinstance(node, (list, tuple)) and type(node) in (list, tuple, torch.Size):
            kind = "list" if isinstance(node, list) else "tuple"
            return Structure(kind=kind, children=self._child_structures(node, path))
        if isinstance(node, (dict, UserDict)):
            if not all(isinstance(key, (str, int)) for key in node):
                raise TraceError(
                    f"{self._label}{path}: only strings and integers can be keys of a dict"
                )
            children = tuple(self.flatten(item, f"{path}[{key!r}]") for key, item in node.items())
            kind = "" if type(node) in (dict, defaultdict) else _type_name(node)
            return Structure(kind="dict", type=kind, keys=tuple(node), children=children)
        remedy = (
            CACHE_REMEDY
            if "cache" in type(node).__name__.lower()
            else "create it in the forward, or assign it to an attribute of the model"
            if type(node).__name__ == "BlockMask"
            else "use tensors, numbers, strings, and lists, tuples, dicts or dataclasses of them"
        )
        raise TraceError(
            f"{self._place(path)} is a {type(node).__name__}, which cannot be traced; {remedy}"
        )

    def _place(self, path: str) -> str:
        """Return the place of an item as the subject of an error message."""
        return f"{self._label}{path}".rstrip(": ")

    def _child_structures(self, node: Sequence[object], path: str) -> tuple[Structure, ...]:
        """Return the structures of a sequence's items."""
        return tuple(self.flatten(item, f"{path}[{i}]") for i, item in enumerate(node))

    def _dataclass_structure(self, node: Any, path: str) -> Structure:
        """Return the structure of a dataclass with its set fields and added attributes. A field
        that is None by default and None here is left out."""
        # Hugging Face's ModelOutput sets absent fields to None: omit them, as it does itself.
        fields = [f for f in dataclasses.fields(node) if f.init]
        names = [
            f.name for f in fields if getattr(node, f.name) is not None or f.default is not None
        ]
        names += _undeclared_attributes(node)
        children = tuple(self.flatten(getattr(node, n), f"{path}.{n}") for n in names)
        return Structure(kind="object", type=_type_name(node), keys=tuple(names), children=children)


def _undeclared_attributes(node: Any) -> list[str]:
    """Return the names of the attributes that code has added to a dataclass; none for a class with
    a `__post_init__`, which may set attributes itself."""
    if hasattr(type(node), "__post_init__"):
        return []
    declared = {f.name for f in dataclasses.fields(node)}
    return [n for n in getattr(node, "__dict__", ()) if n not in declared and n.isidentifier()]


@dataclasses.dataclass(frozen=True)
class ObjectTreeSpec:
    """The structure of a tree that `flatten_objects` flattened.

    `spec` is torch's, for the containers that torch knows. `dataclass_entries` has an entry for
    each of its leaves: None, or for a dataclass with tensors its class, attribute names and
    structure.
    """

    spec: TreeSpec
    dataclass_entries: tuple[tuple[type, tuple[str, ...], ObjectTreeSpec] | None, ...]

    @property
    def leaf_count(self) -> int:
        """The number of leaves of the whole tree."""
        return sum(1 if entry is None else entry[2].leaf_count for entry in self.dataclass_entries)


def flatten_objects(tree: object) -> tuple[list[Any], ObjectTreeSpec]:
    """Return the leaves in lists, tuples, dicts and dataclasses, and the structure of these.

    Unlike for `flatten`, leaves may be any objects, and one that occurs twice is listed twice.
    """
    return _flatten_objects_below(tree, ())


def _flatten_objects_below(
    tree: object, ancestors: tuple[object, ...]
) -> tuple[list[Any], ObjectTreeSpec]:
    """Return the result of `flatten_objects` for a part of a tree; an object among its `ancestors`
    is a leaf."""
    torch_leaves, spec = tree_flatten(tree)
    leaves: list[Any] = []
    entries: list[tuple[type, tuple[str, ...], ObjectTreeSpec] | None] = []
    for leaf in torch_leaves:
        is_cycle = any(leaf is ancestor for ancestor in ancestors)
        names = () if is_cycle else _attribute_names(leaf)
        values = [getattr(leaf, name) for name in names]
        inner_leaves, inner_spec = _flatten_objects_below(values, (*ancestors, leaf))
        if names and any(isinstance(item, torch.Tensor) for item in inner_leaves):
            leaves += inner_leaves
            entries.append((type(leaf), names, inner_spec))
        else:
            leaves.append(leaf)
            entries.append(None)
    return leaves, ObjectTreeSpec(spec, tuple(entries))


def _attribute_names(item: object) -> tuple[str, ...]:
    """Return the names of the attributes that are set in a dataclass; none for other objects."""
    if not dataclasses.is_dataclass(item) or isinstance(item, type | torch.nn.Module):
        return ()
    fields = [f.name for f in dataclasses.fields(item) if hasattr(item, f.name)]
    return tuple(dict.fromkeys([*fields, *getattr(item, "__dict__", ())]))


def unflatten_objects(leaves: Sequence[Any], tree_spec: ObjectTreeSpec) -> Any:
    """Rebuild a tree from its leaves: the inverse of `flatten_objects`."""
    remaining = iter(leaves)
    torch_leaves: list[Any] = []
    for entry in tree_spec.dataclass_entries:
        if entry is None:
            torch_leaves.append(next(remaining))
            continue
        cls, names, inner_spec = entry
        instance = object.__new__(cls)
        inner_leaves = list(islice(remaining, inner_spec.leaf_count))
        for name, item in zip(names, unflatten_objects(inner_leaves, inner_spec), strict=True):
            object.__setattr__(instance, name, item)  # frozen dataclasses as well
        torch_leaves.append(instance)
    return tree_unflatten(torch_leaves, tree_spec.spec)


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return all tensors in a tree of any objects."""
    return [leaf for leaf in flatten_objects(tree)[0] if isinstance(leaf, torch.Tensor)]


def unflatten(structure: Structure, leaves: Sequence[object]) -> Any:
    """Rebuild a tree from its tensors: the inverse of `flatten`. Raises `DocumentError` for a type
    whose module is not imported."""
    return unflattener(structure)(leaves)


def unflattener(structure: Structure) -> Callable[[Sequence[object]], Any]:
    """Return a function that rebuilds a tree from its leaves; types are looked up once, here."""
    match structure.kind:
        case "leaf":
            index = structure.leaf
            return lambda leaves: leaves[index]
        case "value":
            value = structure.value
            return lambda leaves: value
        case "dropped":
            dropped = DroppedOutput(str(structure.value))
            return lambda leaves: dropped
    parts = [unflattener(child) for child in structure.children]
    keys = structure.keys
    match structure.kind:
        case "list":
            return lambda leaves: [part(leaves) for part in parts]
        case "tuple":
            return lambda leaves: tuple(part(leaves) for part in parts)
        case "namedtuple":
            cls = _resolve_container_type(structure.type)
            return lambda leaves: cls(*(part(leaves) for part in parts))
        case "object":
            cls = _resolve_container_type(structure.type)
            return partial(_build_dataclass, cls, dict(zip(map(str, keys), parts, strict=True)))
        case _:
            cls = _resolve_container_type(structure.type) if structure.type else dict
            return lambda leaves: cls(
                {k: part(leaves) for k, part in zip(keys, parts, strict=True)}
            )


def _build_dataclass(
    cls: Any, parts: Mapping[str, Callable[[Sequence[object]], Any]], leaves: Sequence[object]
) -> Any:
    """Build a dataclass. `parts` rebuilds the value of each attribute from the leaves; attributes
    that are no fields are set afterwards. Raises `DocumentError` for an attribute that the class
    defines."""
    values = {name: part(leaves) for name, part in parts.items()}
    declared = {f.name for f in dataclasses.fields(cls)}
    instance = cls(**{name: value for name, value in values.items() if name in declared})
    for name in values.keys() - declared:
        if name.startswith("__") or hasattr(cls, name):
            raise DocumentError(f"a program must not set {cls.__qualname__}.{name}")
        object.__setattr__(instance, name, values[name])
    return instance


def _builtin_scalar(value: Any) -> Any:
    """Convert an instance of a subclass of float, complex or str, such as NumPy's, to the builtin
    type."""
    builtins: tuple[Any, ...] = (float, complex, str)
    cls = next((c for c in builtins if isinstance(value, c)), None)
    return value if cls is None or type(value) is cls else cls(value)


def _type_name(node: object) -> str:
    """Return the module and the qualified name of an object's class, as one text."""
    return f"{type(node).__module__}:{type(node).__qualname__}"


def _resolve_container_type(name: str) -> Callable[..., Any]:
    """Return the class that `_type_name` named. Raises `DocumentError` unless it is a dataclass,
    named tuple or dict of an imported module."""
    module_name, _, qualname = name.partition(":")
    cls: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        cls = getattr(cls, part, None) if not part.startswith("__") else None
    is_container = isinstance(cls, type) and (
        dataclasses.is_dataclass(cls)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
        or issubclass(cls, (dict, UserDict))
    )
    if not is_container:
        raise DocumentError(
            f"the type {name[:200]} of an argument or output is not a dataclass, named tuple or "
            "dict of a module that is imported; import the model's package before lowering its "
            "program"
        )
    return cls


class DroppedOutput:
    """Placeholder for a tensor that the step did not return. Operators, functions of torch and
    attributes raise `OutputNotComputed`; `repr`, `is None`, `hash`, pickles and copies do not."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f'<{self._path}: not returned in training, with outputs="loss">'

    def __reduce__(self) -> tuple[Any, ...]:
        return DroppedOutput, (self._path,)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._not_computed_error()

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise the error in place of any function of torch."""
        leaves = tree_leaves((args, kwargs))
        raise next(leaf for leaf in leaves if isinstance(leaf, cls))._not_computed_error()

    def _not_computed_error(self) -> OutputNotComputed:
        """Return the error for any use of the missing tensor."""
        return OutputNotComputed(
            f"the output {self._path!r} was not returned: the training step is planned with "
            'outputs="loss", which needs no memory for the other outputs. Read it in evaluation, '
            'under torch.no_grad(), or plan with outputs="dropped", with which it can be read '
            "before the backward"
        )


def _raise_not_computed(self: DroppedOutput, *args: object, **kwargs: object) -> NoReturn:
    """Raise the error of a dropped output: the body of its operators."""
    raise self._not_computed_error()


_USES = (
    "abs add and bool call complex contains divmod eq float floordiv ge getitem gt index int "
    "invert iter le len lshift lt matmul mod mul ne neg or pos pow radd rand rfloordiv rlshift "
    "rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem sub truediv xor"
)
for _name in _USES.split():
    setattr(DroppedOutput, f"__{_name}__", _raise_not_computed)
DroppedOutput.__hash__ = object.__hash__  # type: ignore[method-assign]
