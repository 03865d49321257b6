"""The steps of a search: their order, their time limits, and the stats that they write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.helpers.search_states import CHAIN, EXACT, SlotSource, fail_with_bug, search_state_of

from remat.errors import SolverWarning
from remat.heuristics.eviction import evict
from remat.milp.backends import SolverOutcome
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution, Stats, merge_stats, step_names
from remat.strategies.search.state import SearchState, SlotProgramResult
from remat.strategies.search.step import SearchStep, run_steps

KEEP_ALL = Schedule.keep_all(CHAIN)
BUDGET_BYTES = 5
THREAD_TIMEOUT_S = 30.0
"""The time that another thread gets for work that takes it almost none."""

Work = Callable[[SearchState, Clock], None]


def best_schedule() -> Schedule:
    """Return the best schedule within the budget: 20 s, where 16 s are needed without one."""
    schedule = evict(CHAIN, BUDGET_BYTES)
    assert schedule is not None
    assert peak_and_time(CHAIN, schedule) == (5, 20.0)
    return schedule


def new_state(budget_bytes: int | None = BUDGET_BYTES, **options: Any) -> SearchState:
    """Return the state of a search for `CHAIN`."""
    return search_state_of(CHAIN, SlotSource(), budget_bytes, replace(EXACT, **options))


def added_stats(state: SearchState) -> Stats:
    """Return the stats that steps added."""
    return {key: fact for key, fact in state.stats.items() if key not in new_state().stats}


def do_nothing(state: SearchState, clock: Clock) -> None: ...


def add_schedule(state: SearchState, clock: Clock) -> None:
    """A step that adds a schedule."""
    state.add_schedules([best_schedule()])


def finish_program(state: SearchState, clock: Clock) -> None:
    """A step that ends like a finished program over all slots."""
    state.slot_result = SlotProgramResult(SolverOutcome.OPTIMAL, 20.0, True)


@dataclass
class Hour:
    """A fake clock of the search, and steps that advance it."""

    now_s: float = 0.0
    granted_s: dict[str, float] = field(default_factory=dict[str, float])
    """The seconds that the clock gave each step, in the order in which they ran."""

    def step(
        self, name: str, work: Work = do_nothing, takes_s: float = 0.0, **step_options: Any
    ) -> SearchStep:
        def timed(state: SearchState, clock: Clock) -> None:
            self.granted_s[name] = clock.remaining_s
            work(state, clock)
            self.now_s += takes_s

        return SearchStep(name, timed, **step_options)

    @property
    def finished_steps(self) -> list[str]:
        """The names of the steps that have run."""
        return list(self.granted_s)


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> Hour:
    fake_hour = Hour()

    class Time:
        monotonic = staticmethod(lambda: fake_hour.now_s)

    monkeypatch.setattr("remat.progress.time", Time)
    return fake_hour


# -- order and time of steps ----------------------------------------------------------------------


def test_steps_run_in_the_order_of_the_pipeline(hour: Hour) -> None:
    state = new_state()
    run_steps([hour.step("c"), hour.step("a"), hour.step("b", add_schedule)], state)
    assert hour.finished_steps == ["c", "a", "b"]
    assert step_names(state.stats) == ["c", "a", "b"]
    assert state.best == best_schedule()


def test_a_step_gets_its_share_of_the_remaining_time(hour: Hour) -> None:
    state = new_state()
    whole_s = state.clock.remaining_s
    assert 0.9 * EXACT.time_limit < whole_s < EXACT.time_limit, "a solver may overrun its deadline"
    steps = [
        hour.step("half", time_share=0.5, takes_s=40.0),
        hour.step("quarter", time_share=0.25, takes_s=8.0),
        hour.step("rest"),
    ]
    run_steps(steps, state)
    assert hour.granted_s == {
        "half": pytest.approx(0.5 * whole_s),
        "quarter": pytest.approx(0.25 * (whole_s - 40.0)),
        "rest": pytest.approx(whole_s - 48.0),
    }


def test_within_the_gap_only_steps_with_a_share_for_it_run(hour: Hour) -> None:
    state = new_state(gap=0.2)
    left_s = state.clock.remaining_s
    steps = [
        hour.step("only within", time_share=0.0, time_share_within_gap=1.0),
        hour.step("eviction", add_schedule, time_share=0.5, time_share_within_gap=0.1),
        hour.step("left out", time_share=0.5),
        hour.step("less", time_share=0.5, time_share_within_gap=0.25),
    ]
    run_steps(steps, state)
    assert state.is_within_gap
    assert hour.granted_s == {
        "eviction": pytest.approx(0.5 * left_s),
        "less": pytest.approx(0.25 * left_s),
    }
    assert step_names(state.stats) == ["eviction", "less"]
    hour.granted_s.clear()
    run_steps(steps, state)
    assert hour.finished_steps == ["only within", "eviction", "less"]


def test_the_gap_is_checked_before_each_step(hour: Hour) -> None:
    """A higher bound closes it as well as a better schedule."""
    state = new_state()
    run_steps([hour.step("a", add_schedule), hour.step("b", finish_program), hour.step("c")], state)
    assert hour.finished_steps == ["a", "b"]
    assert state.is_within_gap


def test_a_step_runs_only_where_it_is_needed(hour: Hour) -> None:
    def has_incumbent(state: SearchState) -> bool:
        return bool(state.incumbents)

    steps = [
        hour.step("early", is_needed=has_incumbent, time_share_within_gap=1.0),
        hour.step("eviction", add_schedule),
        hour.step("late", is_needed=has_incumbent),
        hour.step("never", is_needed=lambda state: False, time_share_within_gap=1.0),
    ]
    search_state = new_state()
    run_steps(steps, search_state)
    assert hour.finished_steps == step_names(search_state.stats) == ["eviction", "late"]


def test_no_step_runs_after_the_time_limit_if_there_is_an_incumbent(hour: Hour) -> None:
    state = new_state()
    slow = state.clock.remaining_s + 1.0
    steps = [
        hour.step("long", takes_s=slow),
        hour.step("eviction", add_schedule),
        hour.step("late", time_share_within_gap=1.0),
    ]
    run_steps(steps, state)
    assert hour.finished_steps == ["long", "eviction"]
    assert hour.granted_s["eviction"] < 0


def test_no_step_runs_after_cancellation_if_there_is_an_incumbent(hour: Hour) -> None:
    cancel = threading.Event()
    state = search_state_of(CHAIN, SlotSource(), BUDGET_BYTES, EXACT, cancel=cancel)
    steps = [
        hour.step("cancelled", lambda search_state, clock: cancel.set()),
        hour.step("eviction", add_schedule),
        hour.step("late"),
    ]
    run_steps(steps, state)
    assert hour.finished_steps == ["cancelled", "eviction"]


# -- concurrent steps -----------------------------------------------------------------------------


@dataclass
class ConcurrentStep:
    """A step that runs until its clock is over, and steps that run while it does."""

    begun: threading.Event = field(default_factory=threading.Event)
    met: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    was_met: bool = False
    remaining_s: float = 0.0

    def work(self, state: SearchState, clock: Clock) -> None:
        self.thread = threading.current_thread()
        self.remaining_s = clock.remaining_s
        self.begun.set()
        self.was_met = self.met.wait(THREAD_TIMEOUT_S)
        while not clock.is_set():
            time.sleep(0.001)
        state.add_schedules([best_schedule()])

    def meet(self, state: SearchState, clock: Clock) -> None:
        assert self.begun.wait(THREAD_TIMEOUT_S)
        assert self.thread is not threading.current_thread()
        self.met.set()


def test_with_two_threads_a_step_runs_concurrently_with_its_successors() -> None:
    concurrent, actual = ConcurrentStep(), new_state(threads=2, time_limit=2 * THREAD_TIMEOUT_S)
    steps = [
        SearchStep("first", do_nothing),
        SearchStep("concurrent", concurrent.work, time_share=0.001, is_concurrent=True),
        SearchStep("second", concurrent.meet),
        SearchStep("third", do_nothing),
    ]
    run_steps(steps, actual)
    assert concurrent.was_met
    assert concurrent.thread is not None
    assert concurrent.thread.name == "remat-concurrent"
    assert not concurrent.thread.is_alive()
    assert concurrent.remaining_s > THREAD_TIMEOUT_S, (
        "a concurrent step is not limited to its share"
    )
    assert actual.clock.remaining_s > 0, "it was stopped before the time limit"
    assert actual.best == best_schedule()
    assert step_names(actual.stats) == ["first", "second", "third", "concurrent"]
    assert float(actual.stats["concurrent_s"]) >= float(actual.stats["third_s"])


def test_a_concurrent_step_ends_where_another_one_fails() -> None:
    concurrent = ConcurrentStep()

    def fail(state: SearchState, clock: Clock) -> None:
        concurrent.meet(state, clock)
        fail_with_bug()

    steps = [
        SearchStep("concurrent", concurrent.work, is_concurrent=True),
        SearchStep("fails", fail, must_succeed=True),
        SearchStep("never", fail_with_bug),
    ]
    state = new_state(threads=2, time_limit=2 * THREAD_TIMEOUT_S)
    with pytest.raises(ZeroDivisionError):
        run_steps(steps, state)
    assert concurrent.was_met
    assert concurrent.thread is not None
    assert not concurrent.thread.is_alive()
    assert step_names(state.stats) == ["fails", "concurrent"]


def test_with_one_thread_a_concurrent_step_gets_its_share_like_others(hour: Hour) -> None:
    def here(state: SearchState, clock: Clock) -> None:
        assert threading.current_thread() is threading.main_thread()

    state = new_state(threads=1)
    left_s = state.clock.remaining_s
    run_steps(
        [hour.step("concurrent", here, time_share=0.3, is_concurrent=True), hour.step("next")],
        state,
    )
    assert list(hour.granted_s.items()) == [
        ("concurrent", pytest.approx(0.3 * left_s)),
        ("next", pytest.approx(left_s)),
    ]
    assert "search_error" not in state.stats


# -- stats ----------------------------------------------------------------------------------------


def test_the_stats_have_cost_and_bound_after_each_step(hour: Hour) -> None:
    state = new_state()
    steps = [
        hour.step("relaxation", takes_s=2.0),
        hour.step("eviction", add_schedule, takes_s=3.0),
        hour.step("program", finish_program, takes_s=5.0),
    ]
    run_steps(steps, state)
    assert added_stats(state) == {
        "steps": "relaxation eviction program",
        "relaxation_s": 2.0,
        "relaxation_bound": 0.0,
        "eviction_s": 3.0,
        "eviction_cost": 0.25,
        "eviction_bound": 0.0,
        "program_s": 5.0,
        "program_cost": 0.25,
        "program_bound": 0.25,
    }


def test_the_stats_of_a_smallest_peak_are_in_bytes(hour: Hour) -> None:
    state = new_state(None)
    steps = [
        hour.step("a", takes_s=1.0),
        hour.step("b", lambda state, _: state.add_schedules([KEEP_ALL])),
        hour.step("c", add_schedule),
    ]
    run_steps(steps, state)
    assert added_stats(state) == {
        "steps": "a b c",
        "a_s": 1.0,
        "b_s": 0.0,
        "c_s": 0.0,
        "b_bytes": 9,
        "b_bound_bytes": state.peak_lower_bound_bytes,
        "c_bytes": 5,
        "c_bound_bytes": state.peak_lower_bound_bytes,
    }
    assert all(isinstance(size, int) for key, size in state.stats.items() if "bytes" in key)


def test_a_repeated_step_adds_its_seconds(hour: Hour) -> None:
    """As the steps for the smallest peak do where a budget is refused; it keeps its place."""
    state = new_state()
    run_steps([hour.step("a", takes_s=2.0), hour.step("b")], state)
    run_steps([hour.step("a", add_schedule, takes_s=3.0)], state)
    assert step_names(state.stats) == ["a", "b"]
    assert state.stats["a_s"] == 5.0
    assert state.stats["a_cost"] == 0.25
    assert "b_cost" not in state.stats


def test_a_failing_step_reports_its_time(hour: Hour) -> None:
    def fail(state: SearchState, clock: Clock) -> None:
        hour.now_s += 7.0
        fail_with_bug()

    state = new_state()
    with pytest.warns(SolverWarning, match="a: ZeroDivisionError"):
        run_steps([SearchStep("a", fail), hour.step("b", add_schedule)], state)
    assert step_names(state.stats) == ["a", "b"]
    assert state.stats["a_s"] == 7.0


def test_the_stats_of_two_solves_are_joined() -> None:
    before = {"steps": "peak_a b", "peak_a_s": 1.0, "b_s": 2.0, "solver": "one"}
    after = {"steps": "b c", "b_s": 3.0, "c_s": 4.0, "solver": "two"}
    assert merge_stats(before, after) == {
        "steps": "peak_a b c",
        "peak_a_s": 1.0,
        "b_s": 3.0,
        "c_s": 4.0,
        "solver": "two",
    }
    assert merge_stats({}, after) == merge_stats(after, {}) == after
    assert merge_stats({"total_s": 1.0}, {}) == {"total_s": 1.0}
    assert before["steps"] == "peak_a b", "neither is changed"


def test_a_solution_has_only_the_stats_of_its_steps(hour: Hour) -> None:
    state = new_state()
    run_steps([hour.step("a", takes_s=2.0), hour.step("b", add_schedule)], state)
    assert Solution(state.best, stats={**state.stats, "total_s": 1.0}).step_stats == added_stats(
        state
    )
    assert Solution(state.best, stats={"a_s": 1.0}).step_stats == {}
