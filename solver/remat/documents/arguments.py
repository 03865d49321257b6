"""Arguments of traced operations, and their JSON form.

In memory an argument is a Python scalar, a tuple of arguments, a `Ref` to a named tensor, or a
`Literal` (a dtype, device, layout or memory format by name). In JSON, `Ref` and `Literal` are
objects with one key, and so are floats that JSON cannot represent.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from remat.documents.base import DescribedBy
from remat.documents.names import (
    LITERAL_PATTERN,
    MAX_LITERAL_LENGTH,
    MAX_STRING_LENGTH,
    check_identifier,
    check_variable,
)

LITERAL_KINDS = ("dtype", "device", "layout", "memory_format")
"""The torch constants that an argument may be: the possible values of `Literal.kind`."""

_LITERAL_NAME = re.compile(LITERAL_PATTERN)


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that refers to the tensor with this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A torch constant by name, such as `Literal("dtype", "float32")` for `torch.float32`."""

    kind: str
    text: str


if TYPE_CHECKING:
    Argument: TypeAlias = (
        "bool | int | float | complex | str | Ref | Literal | tuple[Argument, ...] | None"
    )
else:
    Argument = object  # pydantic cannot follow a recursive alias; `decode_argument` checks instead


_MAX_FLOAT = int(sys.float_info.max)

_UNCHANGED_TYPES = frozenset({type(None), bool, float, complex, Ref, Literal})
"""Types that `decode_argument` returns without a further check."""


def encode_argument(argument: Argument) -> object:
    """Return the JSON form of an argument."""
    match argument:
        case Ref(name):
            return {"ref": name}
        case Literal(kind, text):
            return {kind: text}
        case tuple():
            return [encode_argument(item) for item in argument]
        case complex():
            return {"complex": [encode_argument(argument.real), encode_argument(argument.imag)]}
        case float() if not math.isfinite(argument):
            return {"float": str(argument)}
        case _:
            return argument


def decode_argument(data: object, depth: int = 0, *, is_json: bool = False) -> Argument:
    """Return the argument that `encode_argument` wrote. Raises ValueError for any other data.

    In JSON an integer over 64 bits is a float: JavaScript writes 1e20 as 100000000000000000000.
    """
    if type(data) is dict:  # checked first for speed: most arguments are references
        return _decode_object(data, depth)
    if type(data) in _UNCHANGED_TYPES:
        return data  # type: ignore[return-value]
    if isinstance(data, (list, tuple)):
        if depth > 16:
            raise ValueError("arguments are nested more than 16 deep")
        return tuple([decode_argument(item, depth + 1, is_json=is_json) for item in data])
    if isinstance(data, str):
        if len(data) > MAX_STRING_LENGTH:
            raise ValueError(f"a string of {len(data):,} characters is too long for an argument")
        return data
    if isinstance(data, int):
        if -(2**63) <= data < 2**63:
            return data
        if is_json and abs(data) < _MAX_FLOAT:
            return float(data)
        raise ValueError(f"integer {str(data)[:40]} does not fit into 64 bits")
    raise ValueError(f"{reprlib.repr(data)[:80]} is no argument of an operation")


def _decode_object(data: dict[str, object], depth: int) -> Argument:
    """Return the argument that a JSON object with one key stands for."""
    if depth <= 16 and len(data) == 1:
        kind, content = next(iter(data.items()))
        if kind == "ref" and isinstance(content, str):
            return Ref(check_variable(content))
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "complex" and isinstance(content, (list, tuple)) and len(content) == 2:
            parts = decode_argument(content[0], depth + 1), decode_argument(content[1], depth + 1)
            if not all(type(part) in (int, float) for part in parts):
                raise ValueError("a complex number needs two numbers")
            return complex(*(float(part) for part in parts))  # type: ignore[arg-type]
        if kind in LITERAL_KINDS and isinstance(content, str) and _is_literal_name(content):
            return Literal(kind, content)
    raise ValueError(f"{reprlib.repr(data)[:80]} is no argument of an operation")


def _is_literal_name(text: str) -> bool:
    """True if the text may name a torch constant."""
    return len(text) <= MAX_LITERAL_LENGTH and _LITERAL_NAME.fullmatch(text) is not None


def _decode_args(data: object, info: ValidationInfo) -> tuple[Argument, ...]:
    """Return the positional arguments in data. Raises ValueError if it is no list of arguments."""
    if not isinstance(data, (list, tuple)):
        raise ValueError("args must be a list")
    is_json = info.mode == "json"
    return tuple([decode_argument(item, is_json=is_json) for item in data])


def _decode_kwargs(data: object, info: ValidationInfo) -> dict[str, Argument]:
    """Return the keyword arguments in data. Raises ValueError if it is no object of arguments."""
    if not isinstance(data, dict):
        raise ValueError("kwargs must be an object")
    is_json = info.mode == "json"
    return {
        check_identifier(str(key)): decode_argument(item, is_json=is_json)
        for key, item in data.items()
    }


def _decode_scalar(data: object, info: ValidationInfo) -> Argument:
    """Return the one argument in data. Raises ValueError if it is none."""
    return decode_argument(data, is_json=info.mode == "json")


Args = Annotated[
    tuple[Argument, ...],
    PlainValidator(_decode_args),
    PlainSerializer(lambda args: [encode_argument(item) for item in args]),
    DescribedBy("Arguments"),
]
Kwargs = Annotated[
    dict[str, Argument],
    PlainValidator(_decode_kwargs),
    PlainSerializer(lambda kwargs: {key: encode_argument(item) for key, item in kwargs.items()}),
    DescribedBy("KeywordArguments"),
]
Scalar = Annotated[
    Argument,
    PlainValidator(_decode_scalar),
    PlainSerializer(encode_argument),
    DescribedBy("Argument"),
]


def referenced_names(argument: object) -> Iterator[str]:
    """Return the names of the tensors that an argument, or a tuple or dict of arguments, refers to,
    in order."""
    names: list[str] = []
    _add_referenced_names(argument, names)
    return iter(names)


def _add_referenced_names(argument: object, names: list[str]) -> None:
    """Append the names that an argument refers to, however nested."""
    if isinstance(argument, Ref):
        names.append(argument.name)
    elif isinstance(argument, tuple):
        for item in argument:
            _add_referenced_names(item, names)
    elif isinstance(argument, dict):
        for item in argument.values():
            _add_referenced_names(item, names)


def rename_refs(argument: Argument, name_of: Callable[[str], str]) -> Argument:
    """Return the argument with the tensor name of every `Ref` in it replaced by `name_of(name)`."""
    if isinstance(argument, Ref):
        return Ref(name_of(argument.name))
    if isinstance(argument, tuple):
        return tuple(rename_refs(item, name_of) for item in argument)
    return argument
