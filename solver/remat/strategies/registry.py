"""Strategies by name, with their options as plain data: for documents and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, cast

from pydantic import ValidationError

from remat.strategies.auto import Auto, Exact
from remat.strategies.base import Strategy
from remat.strategies.baselines.chen import ArticulationPoints, ChenGreedy, ChenSqrt
from remat.strategies.baselines.saved_values import Knapsack, Selective
from remat.strategies.baselines.uniform import EveryK, KeepAll, PerBlock, RecomputeAll
from remat.strategies.option_types import option_error, options_schema
from remat.strategies.published.chain_checkpoints import Revolve, Rotor
from remat.strategies.published.checkmate import CheckmateMilp, LpRounding

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
    "selective": Selective,
    "revolve": Revolve,
    "rotor": Rotor,
    "recompute_all": RecomputeAll,
    "lp_rounding": LpRounding,
    "checkmate": CheckmateMilp,
}
"""Every strategy by its name: for `compare`, the command line, the service and the tests of all
strategies."""

COMPARED_AS: dict[str, tuple[Strategy, ...]] = {
    "exact": (),  # for small graphs
    "articulation_points": (ArticulationPoints("sqrt"), ArticulationPoints("greedy")),
    "lp_rounding": (LpRounding(time_limit=60.0),),
    "checkmate": (CheckmateMilp(time_limit=60.0),),
}
"""The variants of a strategy that `compare` shows, unless it is the one with default options."""

_INFINITY_S = 1e9
"""Replaces infinity in JSON, which has none."""


def compared_by_default() -> list[Strategy]:
    """Return the strategies that `compare` shows, in the order of `STRATEGIES`."""
    variants = (COMPARED_AS.get(name, (kind(),)) for name, kind in STRATEGIES.items())
    return [strategy for group in variants for strategy in group]


def to_data(strategy: Strategy) -> dict[str, object]:
    """Return `{"name": "auto", "gap": 0.005, ...}`: all options, defaults included, and 1e9 for
    infinity.

    Raises ValueError for a strategy that is not one of remat's.
    """
    for name, kind in STRATEGIES.items():
        if type(strategy) is kind:
            options = {f.name: getattr(strategy, f.name) for f in fields(kind)}
            return {"name": name, **{key: _finite_option(value) for key, value in options.items()}}
    raise ValueError(
        f"{type(strategy).__name__} is none of remat's strategies: {_strategy_names()}"
    )


def from_data(data: object) -> Strategy:
    """Return the strategy that `to_data` wrote; omitted options have their defaults.

    Raises ValueError that names the wrong option.
    """
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(
            f'a strategy is an object like {{"name": "auto"}}; names are {_strategy_names()}'
        )
    name = data["name"]
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy {name[:80]!r}; names are {_strategy_names()}")
    kind = STRATEGIES[name]
    options = {key: value for key, value in data.items() if key != "name"}
    try:
        checked = options_schema(kind).model_validate_json(
            json.dumps(options)
        )  # strict, but lists pass
    except ValidationError as error:
        raise ValueError(option_error(kind, error)) from None
    return cast(Strategy, kind(**dict(checked)))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of what `from_data` accepts: one object for each strategy."""
    return {"oneOf": [_strategy_schema(name, kind) for name, kind in STRATEGIES.items()]}


def _strategy_schema(name: str, kind: type[Any]) -> dict[str, Any]:
    schema = options_schema(kind).model_json_schema()
    schema["properties"] = {**schema["properties"], "name": {"const": name}}
    schema["required"] = ["name"]
    return schema


def _finite_option(value: object) -> object:
    return _INFINITY_S if isinstance(value, float) and math.isinf(value) else value


def _strategy_names() -> str:
    return ", ".join(STRATEGIES)
