"""Torch operations by name: which ones a document may call, and with which arguments.

A document may come from an untrusted source, so a name is looked up, never imported, and only
functional ATen and prims operations are allowed. Two that look functional are refused because they
access files: `aten.from_file` and `aten.save` (which returns no tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from remat.documents.arguments import Argument, Literal, Ref
from remat.documents.base import NAMESPACES
from remat.documents.names import check_target
from remat.documents.records import TensorMeta
from remat.documents.targets import COPY_TARGET
from remat.documents.writes import OUT_VARIANTS
from remat.errors import DocumentError, TraceError

Operator: TypeAlias = Callable[..., object]

REMAT_OPERATIONS: dict[str, Operator] = {}
"""The operations that remat defines, by target ("remat.accumulate.default"); see
`register_operator`."""

_ACCESSES_FILES = frozenset({"aten.from_file.default", "aten.from_file.out"})
_LITERAL_TYPES: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def register_operator(name: str, function: Operator) -> Operator:
    """Let documents call `function` as the target `name`, and return it. Raises ValueError unless
    the name is in the namespace `remat` and new."""
    if not check_target(name).startswith("remat."):
        raise ValueError(f"{name}: remat's operations are in the namespace remat")
    if REMAT_OPERATIONS.get(name, function) is not function:
        raise ValueError(f"{name} is registered already")
    REMAT_OPERATIONS[name] = function
    return function


MEASURABLE_NAMESPACES = NAMESPACES | {"bitsandbytes"}
"""The namespaces whose operators a measurement may run; bitsandbytes' exist once the process has
imported it, which the service does not."""


def resolve_operator(target: str, namespaces: Collection[str] = NAMESPACES) -> Operator:
    """Return the function that a target names: an `OpOverload`, or one of remat's operations.

    Raises `DocumentError` if the name is malformed, unknown or outside of the allowed `namespaces`,
    or if the operation is not functional (`aten.copy_.default` is the one exception).
    """
    if target.startswith("remat."):
        if target not in REMAT_OPERATIONS:
            raise DocumentError(f"{target} is none of remat's operations: a newer remat wrote it?")
        return REMAT_OPERATIONS[target]
    operator = find_operator(target, namespaces)
    _check_operator_functional(target, operator)
    return operator


def find_operator(target: str, namespaces: Collection[str]) -> OpOverload:
    """Return torch's operator of this name, also if it is not functional. Raises `DocumentError` if
    the name is malformed, unknown, or in a namespace that is not allowed."""
    try:
        namespace, name, overload = check_target(target).split(".")
    except ValueError as error:
        raise DocumentError(str(error)) from None
    if namespace not in namespaces:
        raise DocumentError(
            f"{target}: operations of namespace {namespace} are not allowed, only those of "
            f"{', '.join(sorted(namespaces))}"
        )
    operator = _lookup_operator(namespace, name, overload)
    if operator is None:
        raise DocumentError(f"torch {torch.__version__} has no operation {target}")
    return operator


def resolve_out_variant(target: str) -> Operator:
    """Return the variant of a target of `OUT_VARIANTS` that writes its result into an argument.

    Raises `DocumentError` where this version of torch has none.
    """
    namespace, name, overload = OUT_VARIANTS[target].target.split(".")
    operator = _lookup_operator(namespace, name, overload)
    if operator is None:
        raise DocumentError(f"torch {torch.__version__} has no operation {name}.{overload}")
    return operator


def check_namespaces_allowed(targets: Iterable[str], namespaces: Collection[str]) -> None:
    """Raise the `DocumentError` of the first operation that `resolve_operator` refuses."""
    for target in dict.fromkeys(targets):
        resolve_operator(target, namespaces)


def _lookup_operator(namespace: str, name: str, overload: str) -> OpOverload | None:
    """Return torch's operator of this name; None if this version of torch has none."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    operator = getattr(packet, overload, None)
    return operator if isinstance(operator, OpOverload) else None


def _check_operator_functional(target: str, operator: OpOverload) -> None:
    """Raise `DocumentError` for an operator that mutates arguments (except `COPY_TARGET`), returns
    no tensor, or accesses files."""
    schema = operator._schema
    if target == COPY_TARGET:
        return
    if schema.is_mutable:
        raise DocumentError(f"{target} mutates its arguments: only {COPY_TARGET} may do that")
    returns_tensors = any("Tensor" in str(item.type) for item in schema.returns)
    if not returns_tensors or target in _ACCESSES_FILES:
        raise DocumentError(f"{target} is not allowed: it is no function from tensors to tensors")


def argument_to_torch(argument: Argument, tensors: Mapping[str, torch.Tensor]) -> object:
    """Convert an argument of a document to the value to pass to torch; references are looked up in
    `tensors`.

    Raises `DocumentError` for a tensor that is not there or a literal that torch does not know.
    """
    match argument:
        case Ref(name):
            if name not in tensors:
                raise DocumentError(f"there is no tensor {name}")
            return tensors[name]
        case Literal(kind, text):
            return literal_to_torch(kind, text)
        case tuple():
            return [argument_to_torch(item, tensors) for item in argument]
        case _:
            return argument


def literal_to_torch(kind: str, text: str) -> object:
    """Return a torch constant by kind and name: ("dtype", "float32") gives `torch.float32`. Raises
    `DocumentError` if there is none."""
    if kind == "device":
        try:
            return torch.device(text)
        except RuntimeError as error:
            first_line = str(error).splitlines()[0]
            raise DocumentError(f"{text!r} is no torch device: {first_line}") from None
    expected_type = _LITERAL_TYPES.get(kind)
    constant = getattr(torch, text, None)
    if expected_type is None or not isinstance(constant, expected_type):
        raise DocumentError(f"{text!r} is no torch {kind}")
    return constant


def argument_from_torch(
    value: object, encode_other: Callable[[object], Argument] | None = None
) -> Argument:
    """Convert an argument of a torch call to data: the inverse of `argument_to_torch`.

    Anything but a scalar, list, tuple or torch constant is passed to `encode_other`, which names fx
    nodes and tensors. Raises `TraceError` for a value that cannot be converted.
    """
    match value:
        case None | bool() | int() | float() | complex() | str():
            return value
        case list() | tuple():
            return tuple(argument_from_torch(item, encode_other) for item in value)
        case torch.device():
            return Literal("device", str(value))
        case torch.dtype() | torch.layout() | torch.memory_format():
            kind = next(k for k, cls in _LITERAL_TYPES.items() if isinstance(value, cls))
            return Literal(kind, str(value).removeprefix("torch."))
    if encode_other is not None:
        return encode_other(value)
    raise TraceError(
        f"an operation has an argument of type {type(value).__qualname__}, which cannot be saved"
    )


def tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """Return the metadata of a tensor."""
    return TensorMeta(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        device=str(tensor.device),
    )


@cache
def written_parameters(operator: object) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the parameters that an operator writes into, by its schema;
    none for a function without a schema."""
    schema = operator._schema.arguments if isinstance(operator, OpOverload) else ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_arguments(
    operator: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the arguments of a call that its operator writes into; of lists, the items."""
    for position, name in written_parameters(operator):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


@cache
def returns_alias(operator: OpOverload) -> bool:
    """True if an operator returns a view of an argument, or an argument."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def is_random(node: fx.Node) -> bool:
    """True if a node samples random numbers. Attention has torch's tag, but without dropout it
    samples none."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            dropout_p = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get("dropout_p", argument.default_value)
            )
            return bool(dropout_p != 0.0)
    return True
