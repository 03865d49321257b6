"""Arguments of traced operations as data, and their JSON form.

In memory an argument is a Python scalar, a tuple of arguments, a `Ref` to a named tensor, or a
`Literal` (a dtype, device, layout or memory format by name). In JSON, `Ref` and `Literal` are
one-key objects, and so are floats that JSON cannot write.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from remat.documents.base import check_identifier, check_variable

MAX_TEXT = 100_000
LITERAL_KINDS = ("dtype", "device", "layout", "memory_format")


@dataclass(frozen=True, slots=True)
class Ref:
    """The tensor with this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A torch constant by name: `Literal("dtype", "float32")`."""

    kind: str
    text: str


if TYPE_CHECKING:
    Argument: TypeAlias = (
        "bool | int | float | complex | str | Ref | Literal | tuple[Argument, ...] | None"
    )
else:
    Argument = object  # pydantic cannot follow a recursive alias; `decode` checks instead


_AS_THEY_ARE = frozenset({type(None), bool, float, complex, Ref, Literal})


def encode(argument: Argument) -> object:
    """The JSON form of an argument."""
    match argument:
        case Ref(name):
            return {"ref": name}
        case Literal(kind, text):
            return {kind: text}
        case tuple():
            return [encode(item) for item in argument]
        case complex():
            return {"complex": [encode(argument.real), encode(argument.imag)]}
        case float() if not math.isfinite(argument):
            return {"float": str(argument)}
        case _:
            return argument


def decode(data: object, depth: int = 0) -> Argument:
    """The argument that `encode` wrote. Raises ValueError on anything else."""
    if type(data) is dict:  # most arguments are references: they come first, for speed
        return _decode_object(data, depth)
    if type(data) in _AS_THEY_ARE:
        return data  # type: ignore[return-value]
    if isinstance(data, (list, tuple)):
        if depth > 16:
            raise ValueError("arguments are nested more than 16 deep")
        return tuple([decode(item, depth + 1) for item in data])
    if isinstance(data, str):
        if len(data) > MAX_TEXT:
            raise ValueError(f"a text of {len(data):,} characters is no argument of an operation")
        return data
    if isinstance(data, int):
        if not -(2**63) <= data < 2**63:
            raise ValueError(f"integer {str(data)[:40]} does not fit into 64 bits")
        return data
    raise ValueError(f"{reprlib.repr(data)[:80]} is no argument of an operation")


def _decode_object(data: dict[str, object], depth: int) -> Argument:
    if depth <= 16 and len(data) == 1:
        kind, told = next(iter(data.items()))
        if kind == "ref" and isinstance(told, str):
            return Ref(check_variable(told))
        if kind == "float" and told in ("inf", "-inf", "nan"):
            return float(told)
        if kind == "complex" and isinstance(told, (list, tuple)) and len(told) == 2:
            parts = decode(told[0], depth + 1), decode(told[1], depth + 1)
            if not all(isinstance(part, (int, float)) for part in parts):
                raise ValueError("a complex number needs two numbers")
            return complex(*(float(part) for part in parts))  # type: ignore[arg-type]
        if kind in LITERAL_KINDS and isinstance(told, str) and _is_word(told):
            return Literal(kind, told)
    raise ValueError(f"{reprlib.repr(data)[:80]} is no argument of an operation")


def _is_word(text: str) -> bool:
    return 0 < len(text) <= 40 and text.replace(":", "").replace("_", "").isalnum()


def _decode_args(data: object) -> tuple[Argument, ...]:
    if not isinstance(data, (list, tuple)):
        raise ValueError("args must be a list")
    return tuple([decode(item) for item in data])


def _decode_kwargs(data: object) -> dict[str, Argument]:
    if not isinstance(data, dict):
        raise ValueError("kwargs must be an object")
    return {check_identifier(str(key)): decode(item) for key, item in data.items()}


Args = Annotated[
    tuple[Argument, ...],
    PlainValidator(_decode_args),
    PlainSerializer(lambda args: [encode(item) for item in args]),
]
Kwargs = Annotated[
    dict[str, Argument],
    PlainValidator(_decode_kwargs),
    PlainSerializer(lambda kwargs: {key: encode(item) for key, item in kwargs.items()}),
]
Scalar = Annotated[Argument, PlainValidator(decode), PlainSerializer(encode)]


def refs(argument: object) -> Iterator[str]:
    """The names that an argument (or a tuple or dict of them) refers to, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from refs(item)


def rename(argument: Argument, name_of: Callable[[str], str]) -> Argument:
    """The argument with every reference renamed."""
    if isinstance(argument, Ref):
        return Ref(name_of(argument.name))
    if isinstance(argument, tuple):
        return tuple(rename(item, name_of) for item in argument)
    return argument
