"""A failing step of a search is reported and skipped; the incumbent is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.helpers.graphs import chain, random_forward_graph
from tests.helpers.search_states import fail_with_bug

import remat
from remat.errors import SolverWarning
from remat.milp.backends import SolverOutcome
from remat.plan import Status
from remat.progress import Clock
from remat.schedule import Schedule
from remat.solution import Solution, step_names
from remat.strategies.base import Task
from remat.strategies.search.runner import MilpRunner
from remat.strategies.search.state import SearchState, SlotProgramResult

GRAPH = random_forward_graph(14, seed=3)
PIPELINE = remat.Auto().steps(GRAPH)
STEPS = {step.name: step for step in PIPELINE.cost}


def proving_nothing(state: SearchState, clock: Clock) -> None:
    """A program that ends early, so that windows run next."""
    state.slot_result = SlotProgramResult(SolverOutcome.FEASIBLE, None, False)


def solved(monkeypatch: pytest.MonkeyPatch, *failed: str, threads: int = 1) -> remat.Plan:
    """Solve with incomplete slots and no gap, so that every step runs."""
    steps = STEPS | {"milp": replace(STEPS["milp"], function=proving_nothing)}
    steps |= {name: replace(steps[name], function=fail_with_bug) for name in failed}
    pipeline = PIPELINE._replace(cost=tuple(steps.values()))
    monkeypatch.setattr(remat.Auto, "steps", lambda self, graph: pipeline)
    auto = remat.Auto(gap=0.0, complete_slots=0, order="off", threads=threads)
    return remat.solve(GRAPH, "75%", auto)


@pytest.mark.parametrize(
    ("name", "threads"),
    [*((name, 1) for name in STEPS if name != "feasibility"), ("checkpoint_cuts", 2)],
)
def test_a_failing_step_is_skipped_and_reported(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(SolverWarning, match=f"{name}: ZeroDivisionError: as if by a bug"):
        plan = solved(monkeypatch, name, threads=threads)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.stats["search_error"] == f"{name}: ZeroDivisionError: as if by a bug"
    assert set(STEPS) - {"feasibility"} <= set(step_names(plan.stats)), "every other step ran"
    assert plan.lower_bound is not None
    assert plan.lower_bound <= plan.overhead
    assert plan.status is Status.FEASIBLE


def test_all_failing_steps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(SolverWarning):
        plan = solved(monkeypatch, "windows", "relaxation_support")
    assert str(plan.stats["search_error"]).count("ZeroDivisionError") == 2


def test_a_failing_feasibility_step_fails_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a schedule that fits, the search cannot go on."""
    names = ("eviction", "baselines", "annealing", "feasibility")
    with pytest.warns(SolverWarning), pytest.raises(ZeroDivisionError):
        solved(monkeypatch, *names)


def test_a_failing_step_is_an_error_where_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in these tests, so that a bug in a step is not missed."""
    with pytest.raises(SolverWarning, match="windows"):
        solved(monkeypatch, "windows")


def test_exact_keeps_the_schedule_of_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MilpRunner, "minimize_cost", fail_with_bug)
    with pytest.warns(SolverWarning, match="milp"):
        plan = remat.solve(chain(5), "70%", remat.Exact(threads=1))
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.status is Status.FEASIBLE


class FailingStrategy:
    """A strategy that fails at some calls."""

    name = "moody"

    def __init__(self, fails: Callable[[int | None, Schedule | None], Exception | None]) -> None:
        self._fails = fails

    def run(self, task: Task) -> Solution:
        error = self._fails(task.budget_bytes, task.start)
        if error is not None:
            raise error
        return remat.Exact(threads=1).run(task)


def test_the_smallest_peak_is_kept_where_lowering_its_cost_fails() -> None:
    moody = FailingStrategy(
        lambda budget_bytes, _: None if budget_bytes is None else MemoryError("none")
    )
    with pytest.warns(SolverWarning, match="moody: MemoryError: none"):
        plan = remat.solve(chain(5), "min", moody)
    assert plan.peak_bytes == remat.solve(chain(5), "min", remat.Exact()).peak_bytes
    assert plan.status is Status.FEASIBLE
    assert plan.stats["search_error"] == "moody: MemoryError: none"


def test_a_sweep_goes_on_with_the_previous_plan() -> None:
    moody = FailingStrategy(lambda _, start: None if start is None else MemoryError("none"))
    with pytest.warns(SolverWarning, match="moody"):
        plans = remat.sweep(chain(5), ["60%", "70%"], moody)
    assert [plan.schedule for plan in plans] == [plans[0].schedule] * 2


def test_a_failure_without_an_incumbent_is_an_error() -> None:
    moody = FailingStrategy(lambda *_: MemoryError("none"))
    with pytest.raises(MemoryError):
        remat.solve(chain(5), "60%", moody)
