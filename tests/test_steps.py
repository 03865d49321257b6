"""The steps of a search: whose turn it is, for how long, and what they write down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.test_mishaps import failing
from tests.test_search import CHAIN, EXACT, Offers, known_of

from remat.errors import SolverWarning
from remat.heuristics.eviction import evict
from remat.milp.backends import Outcome
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution, Stats, joined, steps_of
from remat.strategies.search import deadline as clocks
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known, OverSlots
from remat.strategies.search.step import Step, run

KEEP_ALL = Schedule.keep_all(CHAIN)
BUDGET_BYTES = 5
PATIENCE_S = 30.0
"""What another thread is given for what takes it no time."""

Work = Callable[[Known, Clock], None]


def fitting() -> Schedule:
    """The best within the budget: 20 s, where 16 s are needed without one."""
    found = evict(CHAIN, BUDGET_BYTES)
    assert found is not None
    assert peak_and_time(CHAIN, found) == (5, 20.0)
    return found


def known(budget_bytes: int | None = BUDGET_BYTES, **options: Any) -> Known:
    return known_of(CHAIN, Offers(), budget_bytes, replace(EXACT, **options))


def written(found: Known) -> Stats:
    """What steps added to the stats."""
    return {key: fact for key, fact in found.stats.items() if key not in known().stats}


def nothing(known: Known, clock: Clock) -> None: ...


def offering(known: Known, clock: Clock) -> None:
    known.offer([fitting()])


def proving(known: Known, clock: Clock) -> None:
    """As a program over all slots that ends."""
    known.over_slots = OverSlots(Outcome.OPTIMAL, 20.0, True)


@dataclass
class Hour:
    """The time as the search sees it, and steps that take some of it."""

    now_s: float = 0.0
    given: dict[str, float] = field(default_factory=dict[str, float])
    """For each step that had its turn, in order: the seconds that its clock gave it."""

    def step(self, name: str, work: Work = nothing, takes_s: float = 0.0, **how: Any) -> Step:
        def told(known: Known, clock: Clock) -> None:
            self.given[name] = clock.left_s
            work(known, clock)
            self.now_s += takes_s

        return Step(name, told, **how)

    @property
    def done(self) -> list[str]:
        """The names of the steps that had their turn."""
        return list(self.given)


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> Hour:
    found = Hour()

    class Time:
        monotonic = staticmethod(lambda: found.now_s)

    monkeypatch.setattr(clocks, "time", Time)
    return found


# -- whose turn it is -----------------------------------------------------------------------------


def test_steps_go_in_their_order(hour: Hour) -> None:
    found = known()
    run([hour.step("c"), hour.step("a"), hour.step("b", offering)], found)
    assert hour.done == ["c", "a", "b"]
    assert steps_of(found.stats) == ["c", "a", "b"]
    assert found.best == fitting()


def test_a_step_has_its_share_of_what_is_left(hour: Hour) -> None:
    found = known()
    whole_s = found.clock.left_s
    steps = [
        hour.step("half", share=0.5, takes_s=40.0),
        hour.step("quarter", share=0.25, takes_s=8.0),
        hour.step("rest"),
    ]
    run(steps, found)
    assert hour.given == {
        "half": pytest.approx(0.5 * whole_s),
        "quarter": pytest.approx(0.25 * (whole_s - 40.0)),
        "rest": pytest.approx(whole_s - 48.0),
    }


def test_where_the_gap_is_reached_only_those_with_a_share_for_that(hour: Hour) -> None:
    found = known(gap=0.2)
    left_s = found.clock.left_s
    steps = [
        hour.step("only within", share=0.0, share_within_gap=1.0),
        hour.step("eviction", offering, share=0.5, share_within_gap=0.1),
        hour.step("left out", share=0.5),
        hour.step("less", share=0.5, share_within_gap=0.25),
    ]
    run(steps, found)
    assert found.is_within_gap
    assert hour.given == {
        "eviction": pytest.approx(0.5 * left_s),
        "less": pytest.approx(0.25 * left_s),
    }
    assert steps_of(found.stats) == ["eviction", "less"]
    hour.given.clear()
    run(steps, found)
    assert hour.done == ["only within", "eviction", "less"]


def test_the_gap_is_looked_at_before_each_step(hour: Hour) -> None:
    """A higher bound closes it as well as a better schedule."""
    found = known()
    run([hour.step("a", offering), hour.step("b", proving), hour.step("c")], found)
    assert hour.done == ["a", "b"]
    assert found.is_within_gap


def test_a_step_says_when_it_is_wanted(hour: Hour) -> None:
    def is_found(known: Known) -> bool:
        return bool(known.rated)

    steps = [
        hour.step("early", is_wanted=is_found, share_within_gap=1.0),
        hour.step("eviction", offering),
        hour.step("late", is_wanted=is_found),
        hour.step("never", is_wanted=lambda known: False, share_within_gap=1.0),
    ]
    found = known()
    run(steps, found)
    assert hour.done == steps_of(found.stats) == ["eviction", "late"]


def test_nothing_is_done_once_the_time_is_up_and_something_is_known(hour: Hour) -> None:
    found = known()
    slow = found.clock.left_s + 1.0
    steps = [
        hour.step("long", takes_s=slow),
        hour.step("eviction", offering),
        hour.step("late", share_within_gap=1.0),
    ]
    run(steps, found)
    assert hour.done == ["long", "eviction"]
    assert hour.given["eviction"] < 0


def test_nothing_is_done_once_it_is_cancelled_and_something_is_known(hour: Hour) -> None:
    cancel = threading.Event()
    found = known_of(CHAIN, Offers(), BUDGET_BYTES, EXACT, cancel=cancel)
    steps = [
        hour.step("cancelled", lambda known, clock: cancel.set()),
        hour.step("eviction", offering),
        hour.step("late"),
    ]
    run(steps, found)
    assert hour.done == ["cancelled", "eviction"]


# -- beside others --------------------------------------------------------------------------------


@dataclass
class Beside:
    """A step that goes on until its clock is over, and the steps that it meets."""

    begun: threading.Event = field(default_factory=threading.Event)
    met: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    was_met: bool = False
    left_s: float = 0.0

    def work(self, known: Known, clock: Clock) -> None:
        self.thread = threading.current_thread()
        self.left_s = clock.left_s
        self.begun.set()
        self.was_met = self.met.wait(PATIENCE_S)
        while not clock.is_over():
            time.sleep(0.001)
        known.offer([fitting()])

    def meet(self, known: Known, clock: Clock) -> None:
        assert self.begun.wait(PATIENCE_S)
        assert self.thread is not threading.current_thread()
        self.met.set()


def test_with_two_threads_a_step_goes_on_beside_all_that_follow() -> None:
    beside, found = Beside(), known(threads=2, time_limit=2 * PATIENCE_S)
    steps = [
        Step("first", nothing),
        Step("beside", beside.work, share=0.001, is_beside=True),
        Step("second", beside.meet),
        Step("third", nothing),
    ]
    run(steps, found)
    assert beside.was_met
    assert beside.thread is not None
    assert beside.thread.name == "remat-beside"
    assert not beside.thread.is_alive()
    assert beside.left_s > PATIENCE_S, "a share is for those that others wait for"
    assert found.clock.left_s > 0, "it was ended, not out of time"
    assert found.best == fitting()
    assert steps_of(found.stats) == ["first", "second", "third", "beside"]
    assert float(found.stats["beside_s"]) >= float(found.stats["third_s"])


def test_a_step_beside_others_is_ended_where_one_of_them_fails() -> None:
    beside = Beside()

    def fail(known: Known, clock: Clock) -> None:
        beside.meet(known, clock)
        failing()

    steps = [
        Step("beside", beside.work, is_beside=True),
        Step("fails", fail, must_succeed=True),
        Step("never", failing),
    ]
    found = known(threads=2, time_limit=2 * PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        run(steps, found)
    assert beside.was_met
    assert beside.thread is not None
    assert not beside.thread.is_alive()
    assert steps_of(found.stats) == ["fails", "beside"]


def test_with_one_thread_it_has_its_share_like_others(hour: Hour) -> None:
    def here(known: Known, clock: Clock) -> None:
        assert threading.current_thread() is threading.main_thread()

    found = known(threads=1)
    left_s = found.clock.left_s
    run([hour.step("beside", here, share=0.3, is_beside=True), hour.step("next")], found)
    assert list(hour.given.items()) == [
        ("beside", pytest.approx(0.3 * left_s)),
        ("next", pytest.approx(left_s)),
    ]
    assert "search_error" not in found.stats


# -- what is written down -------------------------------------------------------------------------


def test_what_was_known_after_each_step(hour: Hour) -> None:
    found = known()
    steps = [
        hour.step("relaxation", takes_s=2.0),
        hour.step("eviction", offering, takes_s=3.0),
        hour.step("program", proving, takes_s=5.0),
    ]
    run(steps, found)
    assert written(found) == {
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


def test_of_the_smallest_peak_it_is_bytes(hour: Hour) -> None:
    found = known(None)
    steps = [
        hour.step("a", takes_s=1.0),
        hour.step("b", lambda known, _: known.offer([KEEP_ALL])),
        hour.step("c", offering),
    ]
    run(steps, found)
    assert written(found) == {
        "steps": "a b c",
        "a_s": 1.0,
        "b_s": 0.0,
        "c_s": 0.0,
        "b_bytes": 9,
        "b_bound_bytes": found.floor_bytes,
        "c_bytes": 5,
        "c_bound_bytes": found.floor_bytes,
    }
    assert all(isinstance(size, int) for key, size in found.stats.items() if "bytes" in key)


def test_a_step_that_is_taken_again_adds_its_seconds(hour: Hour) -> None:
    """As those for the smallest peak are, where a budget is refused; it keeps its place."""
    found = known()
    run([hour.step("a", takes_s=2.0), hour.step("b")], found)
    run([hour.step("a", offering, takes_s=3.0)], found)
    assert steps_of(found.stats) == ["a", "b"]
    assert found.stats["a_s"] == 5.0
    assert found.stats["a_cost"] == 0.25
    assert "b_cost" not in found.stats


def test_a_step_that_fails_says_what_it_took(hour: Hour) -> None:
    def fail(known: Known, clock: Clock) -> None:
        hour.now_s += 7.0
        failing()

    found = known()
    with pytest.warns(SolverWarning, match="a: ZeroDivisionError"):
        run([Step("a", fail), hour.step("b", offering)], found)
    assert steps_of(found.stats) == ["a", "b"]
    assert found.stats["a_s"] == 7.0


def test_two_solves_are_joined() -> None:
    before = {"steps": "peak_a b", "peak_a_s": 1.0, "b_s": 2.0, "solver": "one"}
    after = {"steps": "b c", "b_s": 3.0, "c_s": 4.0, "solver": "two"}
    assert joined(before, after) == {
        "steps": "peak_a b c",
        "peak_a_s": 1.0,
        "b_s": 3.0,
        "c_s": 4.0,
        "solver": "two",
    }
    assert joined({}, after) == joined(after, {}) == after
    assert joined({"total_s": 1.0}, {}) == {"total_s": 1.0}
    assert before["steps"] == "peak_a b", "neither is changed"


def test_a_solution_has_the_facts_of_its_steps_alone(hour: Hour) -> None:
    found = known()
    run([hour.step("a", takes_s=2.0), hour.step("b", offering)], found)
    assert Solution(found.best, stats={**found.stats, "total_s": 1.0}).steps == written(found)
    assert Solution(found.best, stats={"a_s": 1.0}).steps == {}
