"""Numbers in documents: their ranges, and integers as JSON writes them.

A range is part of a field's type, so the JSON schema of a document has it, and pydantic checks it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, WithJsonSchema
from pydantic_core import core_schema

_LIMIT_BYTES = 2**62
"""Limit of the sizes in a graph: see `remat.graph`, which limits their sum."""

_LIMIT_S = 1e100
"""Limit of a cost, and the inverse of the smallest cost that is not zero: see `remat.graph`."""


def _check_cost(cost: float) -> float:
    """Return the cost. Raises ValueError if it is positive and too small for the solver."""
    if 0 < cost < 1 / _LIMIT_S:
        raise ValueError(f"costs are zero, or at least {1 / _LIMIT_S:g} s")
    return cost


Natural = Annotated[int, Field(ge=0)]
"""A whole number from zero."""

Int64 = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number from zero that a signed integer of 64 bits can hold."""

Size = Annotated[int, Field(ge=0, lt=_LIMIT_BYTES)]
"""A size in bytes."""

Amount = Annotated[float, Field(ge=0)]
"""A number from zero."""

Cost = Annotated[
    float,
    Field(ge=0, lt=_LIMIT_S),
    AfterValidator(_check_cost),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": 0},
                {"type": "number", "minimum": 1 / _LIMIT_S, "exclusiveMaximum": _LIMIT_S},
            ]
        }
    ),
]
"""The time of an operation in seconds."""


def accept_whole_floats(schema: object) -> None:
    """Let every integer of a pydantic core schema accept a number such as 2.0 in JSON.

    JSON has one kind of number, and its schemas call 2.0 an integer, too. Values from Python code
    are not converted. An integer that may also be a float stays what it is.
    """
    if isinstance(schema, list):
        for part in schema:
            accept_whole_floats(part)
    if not isinstance(schema, dict) or _is_converted(schema):
        return
    for key, part in schema.items():
        if schema.get("type") == "union" and key == "choices" and _has_float(part):
            continue
        if isinstance(part, dict) and part.get("type") == "int":
            schema[key] = _with_whole_floats(part)
        elif isinstance(part, list):
            part[:] = [_with_whole_floats(item) if _is_int(item) else item for item in part]
            accept_whole_floats(part)
        else:
            accept_whole_floats(part)


def _is_int(schema: object) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "int"


def _has_float(choices: Any) -> bool:
    return any(isinstance(choice, dict) and choice.get("type") == "float" for choice in choices)


def _is_converted(schema: dict[str, Any]) -> bool:
    function = schema.get("function")
    return isinstance(function, dict) and function.get("function") is _whole_number


def _with_whole_floats(schema: Any) -> Any:
    return core_schema.with_info_before_validator_function(_whole_number, schema)


def _whole_number(value: object, info: ValidationInfo) -> object:
    """Return the integer that a float of a JSON document stands for; any other value unchanged."""
    if type(value) is float and info.mode == "json" and value.is_integer():
        return int(value)
    return value
