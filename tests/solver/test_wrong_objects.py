"""Objects of another stage in place of the right one: a TypeError says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.graphs import chain

import remat
from remat.plan import Plan
from remat.strategies import KeepAll

GRAPH = chain(4)
PLAN = remat.solve(GRAPH, "100%", KeepAll())

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "explain a plan": (lambda: PLAN.explain(_any(PLAN)), "a module; got a Plan: pass text"),
    "explain nothing": (lambda: PLAN.explain(_any(None)), "got None: pass text"),
    "diff with text": (lambda: PLAN.diff(_any("x")), "diff needs a Plan; got a str: pass what"),
    "solve a plan": (lambda: remat.solve(_any(PLAN), "60%"), "got a Plan: pass its `graph`"),
    "solve a file": (lambda: remat.solve(_any("f"), "60%"), r"got a str: pass remat\.measure"),
    "sweep a plan": (lambda: remat.sweep(_any(PLAN)), "sweep needs a Graph or a Trace; got a Plan"),
    "sweep one budget": (lambda: remat.sweep(GRAPH, "60%"), r"got a str: pass a list: \['60%'\]"),
    "sweep bytes": (lambda: remat.sweep(GRAPH, _any(8)), r"got an int: pass a list: \[8\]"),
    "compare a plan": (lambda: remat.compare(_any(PLAN)), "compare needs a Graph or a Trace"),
    "compare one budget": (lambda: remat.compare(GRAPH, "60%"), "compare needs several budgets"),
    "simulate a plan": (lambda: remat.simulate(_any(PLAN), PLAN.schedule), "pass trace.graph()"),
    "simulate by a plan": (lambda: remat.simulate(GRAPH, _any(PLAN)), "pass plan.schedule"),
    "rewrite a graph": (lambda: remat.rewrite(_any(GRAPH), PLAN.schedule), "rewrite needs a Trace"),
    "no text": (
        lambda: Plan.from_json(_any({})),
        r"got a dict: pass the text, or PlanDocument\.load",
    ),
    "no networkx": (lambda: remat.Graph.from_networkx(_any(GRAPH)), "needs a networkx.DiGraph"),
}


def _any(value: object) -> Any:
    return value


@pytest.mark.parametrize("case", WRONG)
def test_another_object_is_refused_with_a_remedy(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(TypeError, match=words):
        call()
