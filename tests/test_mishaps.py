"""A part of a search that fails is told of, and takes no plan in hand with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
from tests.graphs import chain
from tests.test_order import layered

import remat
from remat.errors import SolverWarning
from remat.graph import Graph
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.search import near_search, search
from remat.strategies.search.near_search import NearSearch
from remat.strategies.search.programs import MilpRunner
from remat.strategies.search.pursuit import Pursuit
from remat.strategies.search.search import OverSlots

PARTS: dict[str, tuple[object, str]] = {
    "identical blocks": (near_search, "blocks_to_tie"),
    "eviction": (search, "fitting"),
    "baselines": (near_search, "quick_schedules"),
    "annealing": (near_search, "annealed"),
    "sifting": (near_search, "sift"),
    "the program over slots": (NearSearch, "_over_offered"),
    "windows": (near_search, "refine"),
    "programs over moments": (Pursuit, "_run"),
}
"""What a part is called when it fails, and what it calls."""


def failing(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("as if by a bug")


def nothing(*arguments: object) -> OverSlots:
    """What a program comes to that ends early; windows are next."""
    best = arguments[3]
    assert isinstance(best, Schedule)
    return OverSlots.none(best)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """With slots that are not complete and no gap allowed, every part has its turn."""
    monkeypatch.setattr(NearSearch, "_over_offered", nothing)
    return layered(14, seed=3)


def solved(graph: Graph, threads: int = 1) -> remat.Plan:
    auto = remat.Auto(gap=0.0, complete_slots=0, order="off", threads=threads)
    return remat.solve(graph, "75%", auto)


@pytest.mark.parametrize(
    ("part", "threads"), [*((part, 1) for part in PARTS), ("programs over moments", 2)]
)
def test_a_part_that_fails_is_left_out(
    graph: Graph, part: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PARTS[part]
    monkeypatch.setattr(owner, name, failing)
    with pytest.warns(SolverWarning, match=f"{part}: ZeroDivisionError: as if by a bug"):
        plan = solved(graph, threads=threads)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.stats["search_error"] == f"{part}: ZeroDivisionError: as if by a bug"
    assert plan.lower_bound is not None
    assert plan.lower_bound <= plan.overhead
    assert plan.status is remat.Status.FEASIBLE


def test_all_parts_that_fail_are_named(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_search, "refine", failing)
    monkeypatch.setattr(near_search, "sift", failing)
    with pytest.warns(SolverWarning):
        plan = solved(graph)
    assert str(plan.stats["search_error"]).count("ZeroDivisionError") == 2


def test_what_fails_is_an_error_where_warnings_are(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in these tests: a bug in a part of the search is not passed over."""
    monkeypatch.setattr(near_search, "refine", failing)
    with pytest.raises(SolverWarning, match="windows"):
        solved(graph)


def test_exact_keeps_what_eviction_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MilpRunner, "solve_cost", failing)
    with pytest.warns(SolverWarning, match="the program over slots"):
        plan = remat.solve(chain(5), "70%", remat.Exact(threads=1))
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.status is remat.Status.FEASIBLE


class Moody:
    """A strategy that fails at some calls."""

    name = "moody"

    def __init__(self, fails: Callable[[int | None, Schedule | None], Exception | None]) -> None:
        self._fails = fails

    def run(self, task: Task) -> Solution:
        error = self._fails(task.budget_bytes, task.start)
        if error is not None:
            raise error
        return remat.Exact(threads=1).run(task)


def test_the_smallest_peak_is_kept_where_its_cost_is_not_improved() -> None:
    moody = Moody(lambda budget_bytes, _: None if budget_bytes is None else MemoryError("none"))
    with pytest.warns(SolverWarning, match="moody: MemoryError: none"):
        plan = remat.solve(chain(5), "min", moody)
    assert plan.peak_bytes == remat.solve(chain(5), "min", remat.Exact()).peak_bytes
    assert plan.status is remat.Status.FEASIBLE
    assert plan.stats["search_error"] == "moody: MemoryError: none"


def test_a_sweep_goes_on_with_the_plan_before() -> None:
    moody = Moody(lambda _, start: None if start is None else MemoryError("none"))
    with pytest.warns(SolverWarning, match="moody"):
        plans = remat.sweep(chain(5), ["60%", "70%"], moody)
    assert [plan.schedule for plan in plans] == [plans[0].schedule] * 2


def test_nothing_in_hand_is_an_error() -> None:
    moody = Moody(lambda *_: MemoryError("none"))
    with pytest.raises(MemoryError):
        remat.solve(chain(5), "60%", moody)
