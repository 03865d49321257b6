"""A registered strategy is in `compare`, on the command line and in the service's schema; wrong
options are refused with the same words in Python and in documents."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest
from tests.helpers.graphs import chain

import remat
from remat.commands.common.exits import UsageError
from remat.commands.common.plan_flags import (
    StrategyFlags,
    complete_strategies,
    complete_strategy,
    strategies_to_compare,
)
from remat.schedule import Schedule
from remat.service.wire import Options
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.option_types import Checked, between
from remat.strategies.registry import (
    COMPARED_AS,
    STRATEGIES,
    compared_by_default,
    from_data,
    json_schema,
    to_data,
)

NAME = "first_again"
GRAPH = chain(3)


@dataclass(frozen=True)
class FirstAgain(Checked):
    """A strategy that recomputes the first operation a number of times."""

    count: Annotated[int, between(1, 9)] = 2
    name = NAME

    def run(self, task: Task) -> Solution:
        first, *others = range(len(task.graph))
        return Solution(Schedule.of([first, *[first] * self.count, *others]))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, NAME, FirstAgain)


def test_a_registered_strategy_is_made_by_name() -> None:
    strategy = from_data({"name": NAME, "count": 3})
    assert strategy == FirstAgain(3)
    assert to_data(strategy) == {"name": NAME, "count": 3}
    plan = remat.solve(GRAPH, "200%", strategy)
    assert plan.stats["strategy"] == NAME
    assert plan.schedule.recomputed(plan.graph) == {0: 3}
    with pytest.raises(ValueError, match="FirstAgain: count is 10; it is from 1 to 9"):
        from_data({"name": NAME, "count": 10})
    with pytest.raises(ValueError, match=f"names are auto, .*, {NAME}$"):
        from_data({"name": "none"})


def test_a_registered_strategy_is_in_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = remat.compare(GRAPH, ["200%"])
    names = list(dict.fromkeys(row.strategy for row in comparison.rows))
    assert names == [strategy.name for strategy in compared_by_default()]
    assert names[0] == "auto"
    assert names[-1] == NAME
    assert {"ap_sqrt", "ap_greedy", "keep_all", "checkmate"} <= set(names)
    assert "exact" not in names
    assert f"\n{NAME} " in str(comparison)
    twice = (FirstAgain(1), FirstAgain(3))
    monkeypatch.setitem(COMPARED_AS, NAME, twice)
    assert compared_by_default()[-2:] == [*twice]
    monkeypatch.setitem(COMPARED_AS, NAME, ())
    assert NAME not in [strategy.name for strategy in compared_by_default()]


def test_a_registered_strategy_is_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StrategyFlags(NAME, ["count=4"]).build() == FirstAgain(4)
    with pytest.raises(UsageError, match="FirstAgain has no option 'k'; its options are count"):
        StrategyFlags(NAME, ["k=1"]).build()
    with pytest.raises(UsageError, match=f"there is no strategy 'none'; names are .*, {NAME}"):
        StrategyFlags("none").build()
    assert complete_strategy("fi") == [NAME]
    assert complete_strategies("auto,fi") == [f"auto,{NAME}"]
    assert strategies_to_compare(None, None, None, None)[-1] == FirstAgain()
    assert strategies_to_compare(f"{NAME},exact", None, None, None) == [FirstAgain(), remat.Exact()]
    monkeypatch.setitem(COMPARED_AS, NAME, (FirstAgain(1), FirstAgain(3)))
    assert strategies_to_compare(NAME, None, None, None) == [FirstAgain(1), FirstAgain(3)]


def test_a_registered_strategy_is_in_the_schema_of_the_service() -> None:
    schema = json.dumps(Options.model_json_schema())
    assert f'"name": {{"const": "{NAME}"}}' in schema
    assert '"count": {"default": 2, "description": "from 1 to 9"' in schema
    sent = Options.model_validate_json(json.dumps({"strategy": {"name": NAME, "count": 5}}))
    assert sent.strategy == FirstAgain(5)
    assert json.loads(sent.model_dump_json())["strategy"] == {"name": NAME, "count": 5}


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


@pytest.mark.parametrize("name", [*STRATEGIES])
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


def test_a_strategy_that_is_not_registered_has_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STRATEGIES, NAME)
    with pytest.raises(ValueError, match=r"none of remat's strategies"):
        to_data(FirstAgain())
