"""Options of strategies. The range of each option is part of its type, and is checked when a
strategy is created, in a program and from a document alike."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from remat.documents.base import Record


def between(low: int, high: int) -> Any:
    """Return the constraint that an integer option is in this range, both ends included."""
    return Field(ge=low, le=high, description=f"from {low} to {high}")


Share = Annotated[float, Field(ge=0, lt=1, description="at least 0 and below 1")]
Seconds = Annotated[float, Field(gt=0, description="above zero")]
Threads = Annotated[int, between(1, 1024)]
Seed = Annotated[int, between(0, 2**31 - 1)]


class Checked:
    """Base of the strategies, which are frozen dataclasses. An option of the wrong type, or out of
    its range, raises a ValueError that says so."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        try:
            options_schema(kind).model_validate(
                {f.name: getattr(self, f.name) for f in fields(kind)}
            )
        except ValidationError as error:
            raise ValueError(option_error(kind, error)) from None


@dataclass(frozen=True)
class MilpOptions(Checked):
    """Base of the strategies that solve programs; `Auto` explains the options."""

    gap: Share = 0.0
    time_limit: Seconds = 300.0
    threads: Threads = 2
    solver: str = "HiGHS"
    seed: Seed = 0

    # Without these two options: solve to the end.
    stall = math.inf
    peak_gap = 0.0


class _OptionsRecord(Record):
    model_config = ConfigDict(allow_inf_nan=True)  # math.inf is no time limit


@cache
def options_schema(kind: type[Any]) -> type[Record]:
    """Return a strict record class with the options of a strategy class."""
    hints = get_type_hints(kind, include_extras=True)
    option_fields: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)
    }
    return create_model(kind.__name__, __base__=_OptionsRecord, **option_fields)


def option_error(kind: type[Any], error: ValidationError) -> str:
    """Return a message about the first invalid option of a strategy: "Auto: gap is -1; it is
    ..."."""
    first = error.errors(include_url=False, include_context=False)[0]
    option = str(first["loc"][0]) if first["loc"] else "options"
    field = options_schema(kind).model_fields.get(option)
    if field is None:
        option_names = ", ".join(options_schema(kind).model_fields) or "none"
        return f"{kind.__name__} has no option {option[:80]!r}; its options are {option_names}"
    is_range = first["type"].startswith(("greater", "less", "too_"))
    expected = f"it is {_option_range_text(field)}" if is_range else first["msg"]
    return f"{kind.__name__}: {option} is {_short_option_value(first['input'])}; {expected}"


def _option_range_text(field: Any) -> str:
    """Return the range of an option's field, or of a part of its type ("int | None", a tuple), as
    text."""
    if field.description:
        return field.description
    parts = getattr(field.annotation, "__args__", ())
    constraints = (constraint for part in parts for constraint in getattr(part, "__metadata__", ()))
    return next((c.description for c in constraints if c.description), "out of range")


def _short_option_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
