"""The search: when it solves a program, from which slots and incumbents, and what it proves."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import highspy
import pytest
from tests.helpers.graphs import chain, random_stages
from tests.helpers.laws import peak_of, time_of
from tests.helpers.search_states import (
    CHAIN,
    EXACT,
    STAGES,
    SlotSource,
    fail_with_bug,
    search_state_of,
)

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout, SolverWarning
from remat.graph import Baseline, Graph, Operation, Value
from remat.heuristics.local_search import EvaluatedSchedule
from remat.heuristics.polish import polish
from remat.milp.backends import SolverOutcome
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.solve import solve
from remat.strategies import Auto
from remat.strategies.search import eviction, pipeline
from remat.strategies.search.eviction import relax_at_checkpoint_cuts
from remat.strategies.search.pipeline import find_feasible_schedule, search
from remat.strategies.search.runner import MilpRunner
from remat.strategies.search.state import SearchState, SlotProgramResult
from remat.strategies.search.step import run_steps


def run_search(
    graph: Graph, slot_source: SlotSource, budget_bytes: int | None, *options: Auto, **more: Any
) -> Solution:
    """Search for the lowest cost within a budget, or for the smallest peak."""
    state = search_state_of(graph, slot_source, budget_bytes, *options, **more)
    return search(state, pipeline.exact_pipeline())


def search_feasible(
    graph: Graph, slot_source: SlotSource, budget_bytes: int, *options: Auto, **more: Any
) -> Schedule:
    """Run the search for a feasible schedule; return the best."""
    state = search_state_of(graph, slot_source, budget_bytes, *options, **more)
    steps = pipeline.exact_pipeline()
    find_feasible_schedule(steps.peak, steps.quick_peak, state, state.clock)
    return state.best


@pytest.fixture
def cancelled() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the search sees: `at`, in seconds."""
    fake_clock = SimpleNamespace(at=0.0)
    monkeypatch.setattr("remat.progress.time", SimpleNamespace(monotonic=lambda: fake_clock.at))
    return fake_clock


# -- the lowest cost ------------------------------------------------------------------------------


def test_retaining_everything_needs_no_program() -> None:
    slot_source = SlotSource()
    for budget_bytes in (9, 10):
        solution = run_search(CHAIN, slot_source, budget_bytes)
        assert solution.schedule == Schedule.keep_all(CHAIN)
        assert (solution.bound, solution.bound_scope, solution.proved) == (16.0, "all orders", True)
    assert slot_source.requests == []
    assert len(run_search(CHAIN, slot_source, 8).schedule) > 16


def test_a_budget_below_one_operations_need_is_proved_infeasible() -> None:
    slot_source = SlotSource()
    with pytest.raises(InfeasibleBudget, match="one operation needs 3 bytes, with what") as error:
        run_search(CHAIN, slot_source, 2)
    assert error.value.is_proved
    assert error.value.min_feasible_bytes == 3
    assert slot_source.requests == []
    assert peak_of(CHAIN, run_search(CHAIN, slot_source, 3).schedule) == 3


def test_a_schedule_at_the_bound_needs_no_program() -> None:
    slot_source = SlotSource()
    expensive = run_search(CHAIN, SlotSource(), 3).schedule
    solution = run_search(CHAIN, slot_source, 5, replace(EXACT, gap=1e-3), start=expensive)
    assert slot_source.requests == []
    assert time_of(CHAIN, solution.schedule) == 20.0
    assert solution.bound == pytest.approx(20.0)
    assert (solution.bound_scope, solution.proved) == ("order", True)


def test_the_program_starts_from_the_cheapest_incumbent() -> None:
    """It gets no slot for an operation that costs more than the incumbent's excess over the
    bound."""
    slot_source = SlotSource()
    solution = run_search(CHAIN, slot_source, 4)
    (((start_schedule,), affordable_s),) = slot_source.requests
    assert affordable_s == pytest.approx(time_of(CHAIN, start_schedule) - CHAIN.total_cost_s)
    assert time_of(CHAIN, solution.schedule) == 23.0
    assert solution.proved
    assert "slots_bound" not in solution.stats


def test_where_the_program_fails_the_cheapest_incumbent_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, slot_source = random_stages(0, 14), SlotSource()
    monkeypatch.setattr(MilpRunner, "minimize_cost", fail_with_bug)
    at_work = search_state_of(graph, slot_source, 115)
    with pytest.warns(SolverWarning, match="milp"):
        solution = search(at_work, pipeline.exact_pipeline())
    (((start_schedule,), _),) = slot_source.requests
    times = [rated.time_s for rated in at_work.incumbents]
    assert len(times) > 1
    assert times == sorted(times)
    assert time_of(graph, start_schedule) == times[0] < times[-1]
    assert solution.schedule == start_schedule
    assert not solution.proved


def test_a_bound_over_incomplete_slots_is_reported_separately() -> None:
    slot_source = SlotSource(is_complete=False)
    solution = run_search(CHAIN, slot_source, 4)
    assert solution.bound == pytest.approx(21.0)
    assert solution.stats["slots_bound"] == pytest.approx(23 / 16 - 1)
    assert not solution.proved


def test_a_schedule_over_incomplete_slots_may_meet_the_bound_of_the_order() -> None:
    """A program finds 23 s where the incumbent takes 30 s, and the bound for the order is 21 s."""
    slot_source, loose = SlotSource(is_complete=False), replace(EXACT, gap=0.1)
    expensive = Schedule.of([*range(8), *range(7), *range(7), *range(8, 16)])
    at_work = search_state_of(CHAIN, slot_source, 4, loose, start=expensive)
    run_steps(pipeline.exact_pipeline().cost[:1], at_work)
    assert not at_work.is_within_gap
    at_work.add_schedules([run_search(CHAIN, SlotSource(), 4).schedule])
    assert at_work.is_within_gap
    assert at_work.bound == pytest.approx(21.0)
    at_work.slot_result = SlotProgramResult(SolverOutcome.FEASIBLE, 99.0, True)
    assert at_work.bound == at_work.objective, "too expensive operations had no slots"


def test_incumbents_are_sorted_by_time() -> None:
    """If they fit, once each, without runs that no operation reads, and polished to retain as much
    as fits."""
    at_work = search_state_of(CHAIN, SlotSource(), 5)
    cheap, expensive = (run_search(CHAIN, SlotSource(), budget).schedule for budget in (5, 3))
    better = polish(CHAIN, expensive, 5)
    assert time_of(CHAIN, cheap) < time_of(CHAIN, better) < time_of(CHAIN, expensive)
    wasteful = Schedule.of([*expensive.runs, 0])
    at_work.add_schedules([expensive, Schedule.keep_all(CHAIN), cheap, wasteful, cheap])
    assert at_work.schedules == [cheap, better]
    assert at_work.objective == time_of(CHAIN, cheap)
    small = at_work.peak_search_state()
    small.add_schedules([cheap, expensive])
    assert small.best == expensive
    assert small.objective == 3


def test_a_schedule_that_recomputes_a_shared_copy_is_no_incumbent() -> None:
    """Two operations need the same copy of `a`, which may be recomputed after them only."""
    operations = (
        Operation("a", (), (0,), 1.0),
        Operation("copy", (0,), (1,), 1.0),
        Operation("release", (0, 1), (2,), 1.0, same_copy_as=1),
        Operation("last", (0, 2), (3,), 1.0),
    )
    values = tuple(Value(operation.name, 1) for operation in operations)
    graph = Graph(operations, values, results=frozenset({3}))
    state = search_state_of(graph, SlotSource())
    between, after = Schedule.of([0, 1, 0, 2, 3]), Schedule.of([0, 1, 2, 0, 3])
    state.add_schedules([between, after, Schedule.keep_all(graph)])
    assert set(state.schedules) == {after, Schedule.keep_all(graph)}


def test_a_schedule_that_fits_only_with_nothing_set_aside_may_be_the_best() -> None:
    at_work = search_state_of(CHAIN, SlotSource(), 5)
    cheap, expensive = (run_search(CHAIN, SlotSource(), budget).schedule for budget in (5, 3))
    at_work.switch_graph(replace(CHAIN), 4)
    at_work.add_schedules([expensive])
    with_all_memory = polish(CHAIN, at_work.best, 5)
    assert time_of(CHAIN, with_all_memory) < at_work.objective
    assert at_work.best_overall() == (with_all_memory, time_of(CHAIN, with_all_memory))
    at_work.add_schedules([expensive, cheap, Schedule.keep_all(CHAIN)])
    assert at_work.best == polish(CHAIN, expensive, 4)
    assert at_work.best_overall() == (cheap, time_of(CHAIN, cheap))


@pytest.mark.slow
def test_a_finished_program_over_all_slots_is_a_proof(cancelled: threading.Event) -> None:
    """Also where its bound is below the time by a rounding error. An unfinished program proves
    nothing."""
    solution = run_search(STAGES, SlotSource(), 57)
    assert solution.bound == pytest.approx(time_of(STAGES, solution.schedule))
    assert solution.proved
    solution = run_search(STAGES, SlotSource(), 57, cancel=cancelled)
    assert solution.bound is not None
    assert solution.bound < time_of(STAGES, solution.schedule)
    assert not solution.proved


@pytest.mark.slow
def test_where_eviction_fails_a_fitting_incumbent_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = run_search(CHAIN, SlotSource(), 3).schedule
    large = run_search(CHAIN, SlotSource(), 8).schedule
    monkeypatch.setattr(eviction, "schedules_within_budget", fail_with_bug)
    slot_source = SlotSource()
    with pytest.warns(SolverWarning, match="eviction"):
        run_search(CHAIN, slot_source, 4, start=small)
    assert slot_source.requests[0][0] == [polish(CHAIN, small, 4)]
    at_work = search_state_of(CHAIN, SlotSource(), 4, start=large)
    assert at_work.schedules == []


def test_a_start_in_another_order_is_ignored() -> None:
    keep_all = Schedule.keep_all(CHAIN)
    branches = random_stages(0, 4)
    reordered = Schedule.of([1, 0, *range(2, len(branches))])
    assert search_state_of(CHAIN, SlotSource()).start is None
    assert search_state_of(CHAIN, SlotSource(), start=keep_all).start is keep_all
    assert search_state_of(branches, SlotSource(), start=reordered).start is None


# -- the smallest peak ----------------------------------------------------------------------------


def test_a_peak_at_the_lower_bound_is_proved_without_a_program() -> None:
    slot_source = SlotSource()
    solution = run_search(CHAIN, slot_source, None)
    assert peak_of(CHAIN, solution.schedule) == 3
    assert (solution.bound, solution.bound_scope, solution.proved) == (3.0, "order", True)
    assert slot_source.requests == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_smallest_peak_is_proved_by_a_program_over_all_slots(seed: int) -> None:
    graph, slot_source = random_stages(seed, 10), SlotSource()
    solution = run_search(graph, slot_source, None)
    assert solution.proved
    assert solution.bound == pytest.approx(peak_of(graph, solution.schedule))
    ((_, affordable_s),) = slot_source.requests
    assert affordable_s == math.inf


def test_incomplete_slots_prove_no_smallest_peak() -> None:
    slot_source = SlotSource(is_complete=False)
    solution = run_search(STAGES, slot_source, None)
    assert len(slot_source.requests) == 1
    assert peak_of(STAGES, solution.schedule) > 48
    assert (solution.bound, solution.proved) == (39.0, False)


def test_a_cancelled_search_solves_no_program(cancelled: threading.Event) -> None:
    """Its answer is the start."""
    slot_source = SlotSource()
    start = run_search(STAGES, slot_source, None).schedule
    slot_source.requests.clear()
    solution = run_search(STAGES, slot_source, None, start=start, cancel=cancelled)
    assert slot_source.requests == []
    assert solution.schedule == start
    assert (solution.bound, solution.proved) == (39.0, False)
    solution = run_search(STAGES, slot_source, None, cancel=cancelled)
    assert solution.schedule == Schedule.keep_all(STAGES)


def test_a_peak_is_small_enough_within_its_gap() -> None:
    """The gap is relative to its bound, 30 bytes, or to a target."""
    graph = chain(8, size=10)
    strict, loose = (
        search_state_of(graph, SlotSource(), None, replace(EXACT, peak_gap=gap))
        for gap in (0.0, 0.5)
    )
    assert [strict.is_good_enough(size) for size in (30, 31, 60)] == [True, False, False]
    assert [loose.is_good_enough(size) for size in (30, 45, 46)] == [True, True, False]
    assert [loose.is_good_enough(size, 0.5) for size in (37, 38)] == [True, False]
    aimed = loose.peak_search_state(target_bytes=35)
    assert [aimed.is_good_enough(size) for size in (35, 36)] == [True, False]


# -- budgets that are hard to meet ----------------------------------------------------------------


def test_a_budget_that_eviction_reaches_needs_no_program() -> None:
    slot_source = SlotSource()
    for budget_bytes in (54, 60):
        schedule = search_feasible(STAGES, slot_source, budget_bytes)
        assert peak_of(STAGES, schedule) <= budget_bytes
    assert slot_source.requests == []


@pytest.mark.parametrize("budget_bytes", [48, 50])
def test_a_budget_that_eviction_does_not_reach_needs_a_program(budget_bytes: int) -> None:
    slot_source = SlotSource()
    schedule = search_feasible(STAGES, slot_source, budget_bytes)
    assert peak_of(STAGES, schedule) <= budget_bytes
    ((_, affordable_s),) = slot_source.requests
    assert affordable_s == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("peak_gap", [0.0, 1e-4])
def test_a_program_over_all_slots_proves_infeasibility(peak_gap: float) -> None:
    with pytest.raises(InfeasibleBudget, match="no schedule of this order") as error:
        run_search(STAGES, SlotSource(), 47, replace(EXACT, peak_gap=peak_gap))
    assert error.value.is_proved
    assert error.value.min_feasible_bytes == 48


def test_one_byte_too_few_is_proved_infeasible() -> None:
    """Where the difference is below the solver's rounding error: by an optimum, not by a bound."""
    values = tuple(Value(v.name, v.size_bytes << 24) for v in STAGES.values)
    large = replace(STAGES, values=values)
    with pytest.raises(InfeasibleBudget) as error:
        run_search(large, SlotSource(), (48 << 24) - 1)
    assert error.value.is_proved


def test_incomplete_slots_prove_no_infeasibility() -> None:
    with pytest.raises(InfeasibleBudget, match="no proof that there is none") as error:
        run_search(STAGES, SlotSource(is_complete=False), 50)
    assert not error.value.is_proved
    smallest_bytes = error.value.min_feasible_bytes
    assert smallest_bytes is not None
    assert 50 < smallest_bytes <= 54


@pytest.mark.slow
def test_a_peak_within_its_gap_proves_no_smaller_one_infeasible() -> None:
    """These peaks are feasible; a program with a gap of a half often ends before it finds them."""
    refused = []
    for seed, least_bytes in ((1, 54), (3, 70), (6, 62), (7, 50), (9, 61)):
        graph = random_stages(seed, 12)
        try:
            schedule = search_feasible(
                graph, SlotSource(), least_bytes, replace(EXACT, peak_gap=0.5)
            )
            assert peak_of(graph, schedule) == least_bytes
        except InfeasibleBudget as error:
            refused.append(error)
    assert refused, "some solvers find more of them than others"
    assert all("no proof that there is none" in str(error) for error in refused)
    assert not any(error.is_proved for error in refused)


def test_a_search_that_runs_out_of_time_proves_no_infeasibility() -> None:
    """A solver has at least a tenth of a second, which is far too little here."""
    graph = chain(40)
    with pytest.raises(SolverTimeout, match="not excluded that there is one"):
        search_feasible(graph, SlotSource(), 3, replace(EXACT, time_limit=1e-6))


def test_a_cancelled_search_without_a_schedule_has_no_answer(cancelled: threading.Event) -> None:
    with pytest.raises(RematError, match="cancelled before any schedule was found"):
        search_feasible(STAGES, SlotSource(), 50, cancel=cancelled)


def test_a_failed_solver_is_named_where_there_is_no_incumbent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)
    with pytest.raises(SolverError, match="the smallest peak found is 54 bytes"):
        search_feasible(STAGES, SlotSource(), 50)
    solution = run_search(STAGES, SlotSource(), None)
    assert (solution.bound, solution.proved) == (39.0, False)


# -- gaps and time --------------------------------------------------------------------------------


def test_a_solution_is_within_the_gap_of_its_bound() -> None:
    """The gap is on total time; well within is a tenth of it."""

    def at_bound(gap: float, bound_s: float) -> SearchState:
        at_work = search_state_of(CHAIN, SlotSource(), 5, replace(EXACT, gap=gap))
        at_work.slot_result = SlotProgramResult(SolverOutcome.FEASIBLE, bound_s, True)
        return at_work

    assert at_bound(0.2, 80.0).is_good_enough(100.0)
    for bound_s in (79.0, 50.0, 1.0):
        assert not at_bound(0.2, bound_s).is_good_enough(100.0)
    assert at_bound(0.2, 98.0).is_good_enough(100.0, 0.1)
    assert not at_bound(0.2, 97.0).is_good_enough(100.0, 0.1)
    for share in (1.0, 0.1):
        assert at_bound(0.2, 100.0).is_good_enough(100.0, share)
        assert not at_bound(0.2, 100.0).is_good_enough(math.inf, share), "no schedule is known"
    assert at_bound(0.0, 100.0).is_good_enough(100.0)
    assert not at_bound(0.0, 99.0).is_good_enough(100.0)


def test_eviction_continues_briefly_within_the_gap(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For three hundredths of the time."""
    at_work = search_state_of(CHAIN, SlotSource(), 5, replace(EXACT, gap=0.2, time_limit=1000.0))
    at_work.slot_result = SlotProgramResult(SolverOutcome.FEASIBLE, 85.0, True)
    answers: list[bool] = []

    def schedules_within_budget(
        *_: object, is_good_enough: Callable[[float], bool], **__: object
    ) -> list[EvaluatedSchedule]:
        for clock.at, time_s in ((529.0, 100.0), (529.0, 86.0), (531.0, 100.0), (531.0, 110.0)):
            answers.append(is_good_enough(time_s))
        return []

    monkeypatch.setattr(eviction, "schedules_within_budget", schedules_within_budget)
    clock.at = 500.0
    eviction.evict_for_cost(at_work, at_work.clock.limited_to_share(0.5))
    assert answers == [False, True, True, False]


def test_a_step_ends_after_its_share_of_the_remaining_time(clock: SimpleNamespace) -> None:
    cancel = threading.Event()
    whole_clock = Clock.of(1000.0, cancel)
    end = whole_clock.remaining_s

    def ends(left_s: float, share: float) -> bool:
        clock.at = end - 400.0
        part = whole_clock.limited_to_share(share)
        clock.at = end - left_s
        return part.is_set()

    assert end == 1000.0
    assert not ends(301.0, 0.25)
    assert ends(299.0, 0.25)
    assert not ends(0.5, 2.0)
    assert ends(-0.5, 2.0), "the search's own end"
    also = threading.Event()
    part = whole_clock.with_cancel(also)
    clock.at = end - 400.0
    assert not part.is_set()
    also.set()
    assert part.is_set()
    assert not whole_clock.is_set()
    cancel.set()
    assert ends(301.0, 0.25)


@pytest.mark.parametrize(("budget_bytes", "share"), [(5, 0.0), (4, 0.1)])
def test_small_values_are_reserved_unless_advice_reached_the_gap(
    budget_bytes: int, share: float
) -> None:
    state = search_state_of(CHAIN, SlotSource(), budget_bytes, replace(EXACT, gap=0.01))
    state.small_values_share = 0.1
    relax_at_checkpoint_cuts(state, state.clock)
    eviction.evict_by_advice(state, state.clock.limited_to(0.5))
    assert simulate(CHAIN, state.best).peak_bytes <= budget_bytes
    assert state.is_within_gap == (share == 0.0)
    assert state.small_values_share == share


def test_a_program_for_the_smallest_peak_needs_complete_slots() -> None:
    steps = pipeline.auto_pipeline(CHAIN).peak
    assert steps[-1].name == "peak_milp"
    assert pipeline.auto_pipeline(CHAIN, has_complete_slots=False).peak == steps[:-1]


def test_where_the_unsplit_step_takes_no_time_no_bound_is_relative_to_it() -> None:
    graph = random_stages(0, 8)
    unsplit = Baseline(peak_of(graph), 0.0)
    strategy = Auto(complete_slots=0, gap=0.0, time_limit=3.0, order="off")
    assert "slots_bound" in solve(graph, "70%", strategy).solve
    plan = solve(replace(graph, unsplit=unsplit), "70%", strategy)
    assert plan.overhead == 0.0
    assert "slots_bound" not in plan.solve
