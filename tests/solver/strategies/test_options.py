"""Options of strategies that are out of range are refused where a strategy is created, and with
the same words where it comes from a document."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest

import remat
from remat.strategies import Solution, Strategy, Task
from remat.strategies.option_types import Checked, between
from remat.strategies.registry import STRATEGIES, from_data, json_schema, to_data

WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("auto", {"gap": -1}, "Auto: gap is -1; it is at least 0 and below 1"),
    ("auto", {"gap": 1.0}, "Auto: gap is 1.0; it is at least 0 and below 1"),
    ("auto", {"order": "On"}, "Auto: order is 'On'; Input should be 'auto', 'on' or 'off'"),
    ("auto", {"time_limit": 0}, "Auto: time_limit is 0; it is above zero"),
    ("auto", {"threads": 0}, "Auto: threads is 0; it is from 1 to 1024"),
    ("auto", {"threads": True}, "Auto: threads is True; Input should be a valid integer"),
    ("auto", {"near_slots": 1_000_001}, "near_slots is 1000001; it is from 0 to 1000000"),
    ("exact", {"seed": -1}, "Exact: seed is -1; it is from 0 to 2147483647"),
    ("every_k", {"k": 0}, "EveryK: k is 0; it is from 1 to 1000000"),
    ("every_k", {"k": 2.5}, "EveryK: k is 2.5; Input should be a valid integer"),
    ("lp_rounding", {"allowances": ()}, "it is 1 to 100 shares, at least 0 and below 1"),
    ("lp_rounding", {"allowances": (0.1, 1.0)}, "it is 1 to 100 shares, at least 0 and below 1"),
    ("articulation_points", {"variant": "both"}, "Input should be 'sqrt' or 'greedy'"),
)


@pytest.mark.parametrize(("name", "options", "words"), WRONG)
def test_wrong_options_are_refused_in_python_and_in_documents(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as in_python:
        STRATEGIES[name](**options)
    with pytest.raises(ValueError, match=re.escape(words)) as from_document:
        from_data(json.loads(json.dumps({"name": name} | options)))
    if "allowances" not in options:  # a tuple in Python is a list in a document
        assert str(in_python.value) == str(from_document.value)


def test_options_without_a_json_form_are_refused_in_documents() -> None:
    with pytest.raises(ValueError, match="time_limit is nan; it is above zero"):
        remat.Auto(time_limit=math.nan)
    assert remat.Auto(stall=math.inf).stall == math.inf
    with pytest.raises(ValueError, match="gap is 2"):
        replace(remat.Auto(), gap=2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_survives_a_json_round_trip(name: str) -> None:
    strategy = STRATEGIES[name]()
    assert from_data(json.loads(json.dumps(to_data(strategy)))) == strategy
    described = next(
        described_strategy
        for described_strategy in json_schema()["oneOf"]
        if described_strategy["properties"]["name"]["const"] == name
    )
    assert described["properties"].keys() == {"name"} | {f.name for f in fields(strategy)}
    for option, schema in described["properties"].items():
        assert option == "name" or not _is_number(schema) or _has_range(schema), option


def _is_number(schema: dict[str, Any]) -> bool:
    return schema.get("type") in ("integer", "number")


def _has_range(schema: dict[str, Any]) -> bool:
    return "minimum" in schema or "exclusiveMinimum" in schema


@dataclass(frozen=True)
class ThirdParty(Checked):
    """A strategy that is not part of remat."""

    times: Annotated[int, between(1, 3)] = 1
    name = "own"

    def run(self, task: Task) -> Solution:
        return Solution(remat.Schedule.keep_all(task.graph))


def test_a_third_party_strategy_survives_a_json_round_trip() -> None:
    third_party: Strategy = ThirdParty(times=3)
    with pytest.raises(ValueError, match="ThirdParty: times is 4; it is from 1 to 3"):
        ThirdParty(times=4)
    with pytest.raises(ValueError, match=r"none of remat's strategies"):
        to_data(third_party)
