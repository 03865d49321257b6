"""Strategies by name, with their options as plain data: for documents and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, cast

from pydantic import ValidationError

from remat.strategies.auto import Auto
from remat.strategies.base import Strategy
from remat.strategies.baselines.articulation import ArticulationPoints
from remat.strategies.baselines.chains.revolve import Revolve
from remat.strategies.baselines.chains.rotor import Rotor
from remat.strategies.baselines.chen_greedy import ChenGreedy
from remat.strategies.baselines.chen_sqrt import ChenSqrt
from remat.strategies.baselines.every_k import EveryK
from remat.strategies.baselines.keep_all import KeepAll
from remat.strategies.baselines.knapsack import Knapsack
from remat.strategies.baselines.per_block import PerBlock
from remat.strategies.baselines.published_milp.checkmate import CheckmateMilp
from remat.strategies.baselines.published_milp.lp_rounding import LpRounding
from remat.strategies.baselines.recompute_all import RecomputeAll
from remat.strategies.baselines.selective import Selective
from remat.strategies.exact import Exact
from remat.strategies.options import schema, words

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
"""Every strategy by its name: for `compare`, the command line, the service and the laws."""

COMPARED_AS: dict[str, tuple[Strategy, ...]] = {
    "exact": (),  # for small graphs
    "articulation_points": (ArticulationPoints("sqrt"), ArticulationPoints("greedy")),
    "lp_rounding": (LpRounding(time_limit=60.0),),
    "checkmate": (CheckmateMilp(time_limit=60.0),),
}
"""What `compare` shows of a strategy, where that is not the one with its defaults."""

_FOREVER_S = 1e9
"""Stands for infinity in JSON, which has none."""


def compared_by_default() -> list[Strategy]:
    """Those that `compare` shows, in the order of `STRATEGIES`."""
    shown = (COMPARED_AS.get(name, (kind(),)) for name, kind in STRATEGIES.items())
    return [strategy for each in shown for strategy in each]


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
    kind = STRATEGIES[name]
    given = {key: value for key, value in data.items() if key != "name"}
    try:
        checked = schema(kind).model_validate_json(json.dumps(given))  # strict, but lists pass
    except ValidationError as error:
        raise ValueError(words(kind, error)) from None
    return cast(Strategy, kind(**dict(checked)))


def json_schema() -> dict[str, Any]:
    """What `from_data` takes, as JSON Schema: one object for each strategy."""
    return {"oneOf": [_described(name, kind) for name, kind in STRATEGIES.items()]}


def _described(name: str, kind: type[Any]) -> dict[str, Any]:
    found = schema(kind).model_json_schema()
    found["properties"] = {**found["properties"], "name": {"const": name}}
    found["required"] = ["name"]
    return found


def _finite(value: object) -> object:
    return _FOREVER_S if isinstance(value, float) and math.isinf(value) else value


def _names() -> str:
    return ", ".join(STRATEGIES)
