"""Options of strategies: the range of each is part of its type, and is checked when a strategy is
made, in a program and from a document alike.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from remat.documents.base import Record


def between(least: int, most: int) -> Any:
    """The range of a whole number, both ends included."""
    return Field(ge=least, le=most, description=f"from {least} to {most}")


Share = Annotated[float, Field(ge=0, lt=1, description="at least 0 and below 1")]
Seconds = Annotated[float, Field(gt=0, description="above zero")]
Threads = Annotated[int, between(1, 1024)]
Seed = Annotated[int, between(0, 2**31 - 1)]


class Checked:
    """A base for strategies, which are frozen dataclasses: options that are not of their type, or
    not in its range, are a ValueError that says so."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        try:
            schema(kind).model_validate({f.name: getattr(self, f.name) for f in fields(kind)})
        except ValidationError as error:
            raise ValueError(words(kind, error)) from None


@dataclass(frozen=True)
class MilpOptions(Checked):
    """A base for strategies that ask a program; what the options mean is said in `Auto`."""

    gap: Share = 0.0
    time_limit: Seconds = 300.0
    threads: Threads = 2
    solver: str = "HiGHS"
    seed: Seed = 0

    # What is no option goes on to the end.
    stall = math.inf
    peak_gap = 0.0


class _Options(Record):
    model_config = ConfigDict(allow_inf_nan=True)  # no limit of time is an infinite one


@cache
def schema(kind: type[Any]) -> type[Record]:
    """A strict record with the options of a kind of strategy."""
    hints = get_type_hints(kind, include_extras=True)
    wanted: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)
    }
    return create_model(kind.__name__, __base__=_Options, **wanted)


def words(kind: type[Any], error: ValidationError) -> str:
    """The first thing that is wrong with a strategy's options: "Auto: gap is -1; it is ..."."""
    first = error.errors(include_url=False, include_context=False)[0]
    option = str(first["loc"][0]) if first["loc"] else "options"
    field = schema(kind).model_fields.get(option)
    if field is None:
        has = ", ".join(schema(kind).model_fields) or "none"
        return f"{kind.__name__} has no option {option[:80]!r}; its options are {has}"
    is_range = first["type"].startswith(("greater", "less", "too_"))
    wanted = f"it is {_range(field)}" if is_range else first["msg"]
    return f"{kind.__name__}: {option} is {_shown(first['input'])}; {wanted}"


def _range(field: Any) -> str:
    """Of a field, or of what it is made of ("int | None", a tuple)."""
    if field.description:
        return field.description
    parts = getattr(field.annotation, "__args__", ())
    inner = (each for part in parts for each in getattr(part, "__metadata__", ()))
    return next((each.description for each in inner if each.description), "out of range")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
