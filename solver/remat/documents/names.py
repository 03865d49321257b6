"""Names in documents: which may become part of generated source (fx turns node names into Python),
and the limits of names and texts."""

from __future__ import annotations

import builtins
import keyword
import re
from functools import lru_cache

IDENTIFIER_PATTERN = "([A-Za-z]|_[A-Za-z0-9])[A-Za-z0-9_]*|_"
"""Regular expression of names in generated code, of Python and of JSON schemas alike. None begins
with two underscores."""

NAMESPACE_PATTERN = "_?[A-Za-z](_?[A-Za-z0-9])*_?"
"""Regular expression of the namespace of an operation: no two underscores in succession."""

MAX_NAME_LENGTH = 200
"""Upper limit of the length of an identifier and of the name of an operation."""

_IDENTIFIER = re.compile(IDENTIFIER_PATTERN)
_WORD = "[A-Za-z_][A-Za-z0-9_]*"
TARGET_PATTERN = rf"{NAMESPACE_PATTERN}\.{_WORD}\.{_WORD}"
_TARGET = re.compile(TARGET_PATTERN)

RESERVED_BY_FX = frozenset(dir(builtins)) | {
    *("self", "args_list", "args_iter"),
    *("torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"),
}
"""Names with another meaning in the source that fx generates; fx gives none of them to a node."""

MAX_STRING_LENGTH = 100_000
"""Upper limit of the length of an argument that is text."""

MAX_LITERAL_LENGTH = 40
LITERAL_PATTERN = "[_:]*[0-9A-Za-z][0-9A-Za-z_:]*"
"""Regular expression of the name of a torch constant."""


@lru_cache(maxsize=1 << 12)
def check_identifier(name: str) -> str:
    """Return `name` if it may name a keyword argument in generated code. Raises ValueError."""
    is_plain = len(name) <= MAX_NAME_LENGTH and _IDENTIFIER.fullmatch(name)
    if not is_plain or keyword.iskeyword(name):
        raise ValueError(f"{name[:80]!r} is not a plain identifier")
    return name


@lru_cache(maxsize=1 << 16)
def check_variable(name: str) -> str:
    """Return `name` if it may become a variable of generated code. Raises ValueError."""
    if name in RESERVED_BY_FX:
        raise ValueError(
            f"{name!r} is not a plain identifier: generated code has another use of it"
        )
    return check_identifier(name)


@lru_cache(maxsize=1 << 12)
def check_target(target: str) -> str:
    """Return `target` if it has the form `namespace.operation.overload`. Raises ValueError."""
    if len(target) > MAX_NAME_LENGTH or not _TARGET.fullmatch(target):
        raise ValueError(f"{target[:80]!r} is not of the form namespace.operation.overload")
    return target
