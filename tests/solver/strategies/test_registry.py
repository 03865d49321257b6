"""A registered strategy is in `compare`, on the command line and in the service's schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

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
