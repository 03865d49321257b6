"""Strategies by name, with their options as plain data: for documents and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, cast, get_type_hints

from pydantic import ValidationError, create_model

from remat.documents import Record
from remat.strategies.articulation import ArticulationPoints
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy
from remat.strategies.checkmate import CheckmateMilp
from remat.strategies.chen_greedy import ChenGreedy
from remat.strategies.chen_sqrt import ChenSqrt
from remat.strategies.every_k import EveryK
from remat.strategies.exact import Exact
from remat.strategies.keep_all import KeepAll
from remat.strategies.knapsack import Knapsack
from remat.strategies.lp_rounding import LpRounding
from remat.strategies.per_block import PerBlock
from remat.strategies.recompute_all import RecomputeAll
from remat.strategies.revolve import Revolve
from remat.strategies.rotor import Rotor

STRATEGIES: dict[str, type[Any]] = {
    "auto": Auto,
    "exact": Exact,
    "keep_all": KeepAll,
    "per_block": PerBlock,
    "every_k": EveryK,
    "chen_sqrt": ChenSqrt,
    "chen_greedy": ChenGreedy,
    "articulation_points": ArticulationPoints,
    "knapsack": Knapsack,
    "revolve": Revolve,
    "rotor": Rotor,
    "recompute_all": RecomputeAll,
    "lp_rounding": LpRounding,
    "checkmate": CheckmateMilp,
}

_RANGES = {
    "threads": (1, 1024),
    "seed": (0, 2**31 - 1),
    "complete_slots": (0, 1_000_000),
    "near_slots": (0, 1_000_000),
    "k": (1, 1_000_000),
    "checkpoints": (1, 1_000_000),
    "parameter_bytes": (0, 2**62),
    "pieces": (1, 100_000),
    "choices": (1, 10_000),
    "slots": (1, 10_000),
    "samples": (0, 10_000),
    "max_operations": (1, 1_000_000),
}
"""What an option of a document may be, both included: anything else is a mistake or an attack."""

_SHARES = ("gap", "peak_gap")
_TIMES = ("time_limit", "stall")
_MOST_ALLOWANCES = 100
_FOREVER_S = 1e9
"""Stands for infinity in JSON, which has none."""


def to_data(strategy: Strategy) -> dict[str, object]:
    """`{"name": "auto", "gap": 0.005, ...}`: all options, defaults included.

    Raises ValueError for a strategy that is none of remat's own.
    """
    for name, kind in STRATEGIES.items():
        if type(strategy) is kind:
            options = {f.name: getattr(strategy, f.name) for f in fields(kind)}
            return {"name": name, **{key: _finite(value) for key, value in options.items()}}
    raise ValueError(f"{type(strategy).__name__} is none of remat's strategies: {_names()}")


def from_data(data: object) -> Strategy:
    """The strategy that `to_data` wrote; options left out have their defaults.

    Raises ValueError that names the wrong option.
    """
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f'a strategy is an object like {{"name": "auto"}}; names are {_names()}')
    name = data["name"]
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy {name[:80]!r}; names are {_names()}")
    given = {key: value for key, value in data.items() if key != "name"}
    try:
        checked = _schema(name).model_validate_json(json.dumps(given))  # strict, but lists pass
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        raise ValueError(f"strategy {name}: {where}: {first['msg']}") from None
    options = dict(checked)
    for option, value in options.items():
        _check_option(f"strategy {name}: {option}", option, value)
    return cast(Strategy, STRATEGIES[name](**options))


def json_schema() -> dict[str, Any]:
    """What `from_data` takes, as JSON Schema: one object for each strategy."""
    return {"oneOf": [_described(name) for name in STRATEGIES]}


def _described(name: str) -> dict[str, Any]:
    found = _schema(name).model_json_schema()
    options = found["properties"]
    for option, schema in options.items():
        if option in _RANGES:
            schema["minimum"], schema["maximum"] = _RANGES[option]
        elif option in _TIMES:
            schema["exclusiveMinimum"] = 0
        elif option in _SHARES:
            schema |= _SHARE
        elif option == "allowances":
            schema |= {"minItems": 1, "maxItems": _MOST_ALLOWANCES}
            schema["items"] |= _SHARE
    found["properties"] = {**options, "name": {"const": name}}
    found["required"] = ["name"]
    return found


_SHARE = {"minimum": 0, "exclusiveMaximum": 1}


def _check_option(where: str, option: str, value: Any) -> None:
    if option in _SHARES and not 0 <= value < 1:
        raise ValueError(f"{where} is {value}; it is at least 0 and below 1")
    if option in _TIMES and not value > 0:
        raise ValueError(f"{where} is {value}; it is above zero")
    if option == "allowances" and not (
        0 < len(value) <= _MOST_ALLOWANCES and all(0 <= share < 1 for share in value)
    ):
        raise ValueError(f"{where} are 1 to {_MOST_ALLOWANCES} shares, at least 0 and below 1")
    least, most = _RANGES.get(option, (0, 0))
    if option in _RANGES and value is not None and not least <= value <= most:
        raise ValueError(f"{where} is {str(value)[:40]}; it is from {least} to {most}")


@cache
def _schema(name: str) -> type[Record]:
    """A strict record with the fields of the strategy's dataclass."""
    kind = STRATEGIES[name]
    hints = get_type_hints(kind)
    wanted: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)
    }
    return create_model(kind.__name__, __base__=Record, **wanted)


def _finite(value: object) -> object:
    return _FOREVER_S if isinstance(value, float) and math.isinf(value) else value


def _names() -> str:
    return ", ".join(STRATEGIES)
