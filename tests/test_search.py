"""The search itself: when it asks a program, what it offers it, and what it says is proved."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import highspy
import pytest
from tests.graphs import chain
from tests.test_baselines import uneven_stages
from tests.test_mishaps import failing

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout, SolverWarning
from remat.graph import Graph, Value
from remat.milp import slots
from remat.milp.backends import Outcome
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.strategies import Exact, Task
from remat.strategies.search import search
from remat.strategies.search.search import OverSlots, Search

EXACT = Exact(threads=1)
CHAIN = chain(8)
"""3 bytes are the least, and eviction finds them; it is 9 without recomputation. Within 5, eviction
finds the best of 20 s and the bound says so; within 4 it is 23 s, and the bound is 21 s."""

STAGES = uneven_stages(1, 10)
"""48 bytes are the least; eviction finds 54, and some operation alone needs 39."""


@dataclass
class Offers:
    """Slots that are offered, all or few, with what they were asked for."""

    is_complete: bool = True
    asked: list[tuple[list[Schedule], float]] = field(default_factory=list)

    def __call__(self, graph: Graph, known: Sequence[Schedule], affordable_s: float) -> Slots:
        self.asked.append((list(known), affordable_s))
        if self.is_complete:
            return slots.complete(graph, affordable_s)
        return slots.recombined(graph, known, region=1)


def searching(graph: Graph, offers: Offers, options: Exact = EXACT, **given: Any) -> Search:
    asked = {key: given.pop(key) for key in ("start", "progress", "cancel") if key in given}
    return Search(Task(graph, **asked), options, offers, **given)


def peak(graph: Graph, schedule: Schedule) -> int:
    return simulate(graph, schedule).peak_bytes


def time_s(graph: Graph, schedule: Schedule) -> float:
    return simulate(graph, schedule).time_s


@pytest.fixture
def cancelled() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the search takes for the time: `at`."""
    found = SimpleNamespace(at=0.0)
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: found.at))
    return found


# -- the least cost -------------------------------------------------------------------------------


def test_what_fits_as_it_is_needs_no_program() -> None:
    offers = Offers()
    for budget_bytes in (9, 10):
        found = searching(CHAIN, offers).least_cost(budget_bytes)
        assert found.schedule == Schedule.keep_all(CHAIN)
        assert (found.bound, found.bound_scope, found.proved) == (16.0, "all orders", True)
    assert offers.asked == []
    assert len(searching(CHAIN, offers).least_cost(8).schedule) > 16


def test_less_than_some_operation_needs_is_proved_infeasible() -> None:
    offers = Offers()
    with pytest.raises(InfeasibleBudget, match="one operation alone needs 3 bytes") as error:
        searching(CHAIN, offers).least_cost(2)
    assert error.value.is_proved
    assert error.value.min_feasible_bytes == 3
    assert offers.asked == []
    assert peak(CHAIN, searching(CHAIN, offers).least_cost(3).schedule) == 3


def test_what_the_bound_proves_needs_no_program() -> None:
    offers = Offers()
    dear = searching(CHAIN, Offers()).least_cost(3).schedule
    found = searching(CHAIN, offers, replace(EXACT, gap=1e-3), start=dear).least_cost(5)
    assert offers.asked == []
    assert time_s(CHAIN, found.schedule) == 20.0
    assert found.bound == pytest.approx(20.0)
    assert (found.bound_scope, found.proved) == ("order", True)


def test_the_program_begins_from_the_cheapest_that_is_known() -> None:
    """And is offered no operation that costs more than what is known is dearer."""
    offers = Offers()
    found = searching(CHAIN, offers).least_cost(4)
    ((known, affordable_s),) = offers.asked
    times = [time_s(CHAIN, each) for each in known]
    assert len(times) > 1
    assert times == sorted(times)
    assert affordable_s == pytest.approx(times[0] - CHAIN.total_cost_s)
    assert time_s(CHAIN, found.schedule) == 23.0
    assert found.proved
    assert "slots_bound" not in found.stats


def test_where_the_program_fails_the_cheapest_that_is_known_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, offers = uneven_stages(0, 10), Offers()
    at_work = searching(graph, offers)
    monkeypatch.setattr(at_work.programs, "solve_cost", failing)
    with pytest.warns(SolverWarning, match="the program over slots"):
        found = at_work.least_cost(75)
    ((known, _),) = offers.asked
    assert time_s(graph, known[0]) < time_s(graph, known[-1])
    assert found.schedule == known[0]
    assert not found.proved


def test_a_bound_over_some_slots_is_a_share_beside_that_of_the_order() -> None:
    offers = Offers(is_complete=False)
    found = searching(CHAIN, offers).least_cost(4)
    assert found.bound == pytest.approx(21.0)
    assert found.stats["slots_bound"] == pytest.approx(23 / 16 - 1)
    assert not found.proved


def test_a_schedule_over_few_slots_may_meet_the_bound_of_the_order() -> None:
    """A program finds 23 s where 30 s were known, and the bound for the order is 21 s."""
    best = searching(CHAIN, Offers()).least_cost(4).schedule
    known = Schedule.of([*range(8), *range(7), *range(7), *range(8, 16)])
    at_work = searching(CHAIN, Offers(), replace(EXACT, gap=0.1))
    answer = replace(OverSlots.none(best).answer, outcome=Outcome.OPTIMAL)
    found = at_work._judged(known, OverSlots(answer, 23.0, False), at_work._advisor(4))
    assert found.schedule == best
    assert found.proved


def test_a_program_over_all_slots_that_ends_is_a_proof(cancelled: threading.Event) -> None:
    """Also where its bound is less than the time by what it rounds. One that did not is none."""
    found = searching(STAGES, Offers()).least_cost(57)
    assert found.bound == pytest.approx(time_s(STAGES, found.schedule))
    assert found.proved
    found = searching(STAGES, Offers(), cancel=cancelled).least_cost(57)
    assert found.bound is not None
    assert found.bound < time_s(STAGES, found.schedule)
    assert not found.proved


def test_what_came_to_nothing_proves_nothing() -> None:
    best = Schedule.keep_all(CHAIN)
    nothing = OverSlots.none(best)
    assert nothing.answer.schedule == best
    assert nothing.answer.outcome is Outcome.FEASIBLE
    assert (nothing.bound_s, nothing.is_complete) == (None, False)


def test_where_eviction_fails_what_is_known_and_fits_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = [searching(CHAIN, Offers()).least_cost(budget).schedule for budget in (8, 3, 4)]
    offers = Offers()
    at_work = searching(CHAIN, offers, start=known[0])
    at_work.found = known[1:]
    monkeypatch.setattr(search, "fitting", failing)
    with pytest.warns(SolverWarning, match="eviction"):
        at_work.least_cost(4)
    assert offers.asked[0][0] == [known[2], known[1]], "the first is too large"


def test_a_start_is_one_in_the_graph_s_order() -> None:
    keep_all = Schedule.keep_all(CHAIN)
    branches = uneven_stages(0, 4)
    swapped = Schedule.of([1, 0, *range(2, len(branches))])
    assert searching(CHAIN, Offers()).start is None
    assert searching(CHAIN, Offers(), start=keep_all).start is keep_all
    assert searching(branches, Offers(), start=swapped).start is None


# -- the smallest peak ----------------------------------------------------------------------------


def test_a_peak_that_some_operation_needs_is_proved_without_a_program() -> None:
    offers = Offers()
    found = searching(CHAIN, offers).least_peak()
    assert peak(CHAIN, found.schedule) == 3
    assert (found.bound, found.bound_scope, found.proved) == (3.0, "order", True)
    assert offers.asked == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_smallest_peak_is_proved_by_a_program_over_all_slots(seed: int) -> None:
    graph, offers = uneven_stages(seed, 10), Offers()
    found = searching(graph, offers).least_peak()
    assert found.proved
    assert found.bound == pytest.approx(peak(graph, found.schedule))
    ((_, affordable_s),) = offers.asked
    assert affordable_s == math.inf


def test_few_slots_prove_no_smallest_peak() -> None:
    offers = Offers(is_complete=False)
    found = searching(STAGES, offers).least_peak()
    assert len(offers.asked) == 1
    assert peak(STAGES, found.schedule) > 48
    assert (found.bound, found.proved) == (39.0, False)


def test_a_cancelled_search_asks_no_program(cancelled: threading.Event) -> None:
    """It has what it began from."""
    offers = Offers()
    start = searching(STAGES, offers).least_peak().schedule
    offers.asked.clear()
    found = searching(STAGES, offers, start=start, cancel=cancelled).least_peak()
    assert offers.asked == []
    assert found.schedule == start
    assert (found.bound, found.proved) == (39.0, False)
    found = searching(STAGES, offers, cancel=cancelled).least_peak()
    assert found.schedule == Schedule.keep_all(STAGES)


def test_a_peak_is_small_within_its_gap() -> None:
    keep_all = Schedule.keep_all(chain(8, size=10))
    strict, loose = (searching(chain(8, size=10), Offers(), peak_gap=gap) for gap in (0.0, 0.5))
    assert [strict._is_small(keep_all, bound) for bound in (89, 90, 91)] == [False, True, True]
    assert [loose._is_small(keep_all, bound) for bound in (59, 60, 61)] == [False, True, True]


# -- budgets that are hard to meet ----------------------------------------------------------------


def test_what_eviction_reaches_needs_no_program() -> None:
    offers = Offers()
    for budget_bytes in (54, 60):
        found = searching(STAGES, offers)._reach(budget_bytes)
        assert peak(STAGES, found) <= budget_bytes
    assert offers.asked == []


@pytest.mark.parametrize("budget_bytes", [48, 50])
def test_what_eviction_does_not_reach_is_asked_of_a_program(budget_bytes: int) -> None:
    offers = Offers()
    found = searching(STAGES, offers)._reach(budget_bytes)
    assert peak(STAGES, found) <= budget_bytes
    ((_, affordable_s),) = offers.asked
    assert affordable_s == math.inf


@pytest.mark.parametrize("peak_gap", [0.0, 1e-4])
def test_what_a_program_over_all_slots_excludes_is_proved_infeasible(peak_gap: float) -> None:
    with pytest.raises(InfeasibleBudget, match="no schedule of this order") as error:
        searching(STAGES, Offers(), peak_gap=peak_gap).least_cost(47)
    assert error.value.is_proved
    assert error.value.min_feasible_bytes == 48


def test_a_byte_too_little_among_many_is_proved_infeasible() -> None:
    """Where the difference is less than what the solver rounds: by an optimum, not by a bound."""
    values = tuple(Value(v.name, v.size_bytes << 24) for v in STAGES.values)
    large = replace(STAGES, values=values)
    with pytest.raises(InfeasibleBudget) as error:
        searching(large, Offers()).least_cost((48 << 24) - 1)
    assert error.value.is_proved


def test_what_few_slots_do_not_hold_is_not_proved_infeasible() -> None:
    with pytest.raises(InfeasibleBudget, match="no proof that there is none") as error:
        searching(STAGES, Offers(is_complete=False)).least_cost(50)
    assert not error.value.is_proved
    smallest_bytes = error.value.min_feasible_bytes
    assert smallest_bytes is not None
    assert 50 < smallest_bytes <= 54


def test_a_peak_within_its_gap_excludes_no_smaller_one() -> None:
    """48 bytes can be reached; a program that may be off by half of it ends before."""
    with pytest.raises(InfeasibleBudget, match="no proof that there is none") as error:
        searching(STAGES, Offers(), peak_gap=0.5)._reach(48)
    assert not error.value.is_proved


def test_what_there_was_no_time_for_is_not_proved_infeasible() -> None:
    """A tenth of a second is the least that a solver has, and far too little for this."""
    graph = chain(40)
    with pytest.raises(SolverTimeout, match="not excluded that there is one"):
        searching(graph, Offers(), Exact(threads=1, time_limit=1e-6))._reach(3)


def test_a_cancelled_search_without_a_schedule_has_no_answer(cancelled: threading.Event) -> None:
    with pytest.raises(RematError, match="cancelled before any schedule was known"):
        searching(STAGES, Offers(), cancel=cancelled)._reach(50)


def test_a_failed_solver_is_named_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)
    with pytest.raises(SolverError, match="the smallest peak found is 54 bytes"):
        searching(STAGES, Offers())._reach(50)
    found = searching(STAGES, Offers()).least_peak()
    assert (found.bound, found.proved) == (39.0, False)


# -- gaps and time --------------------------------------------------------------------------------


def test_what_is_within_the_gap() -> None:
    """Of total time; and well within is a tenth of it."""
    at_work = searching(CHAIN, Offers(), replace(EXACT, gap=0.2))
    assert at_work._is_within_gap(100.0, 80.0)
    for bound_s in (79.0, 50.0, 1.0):
        assert not at_work._is_within_gap(100.0, bound_s)
    assert at_work._is_well_within_gap(100.0, 98.0)
    assert not at_work._is_well_within_gap(100.0, 97.0)
    for is_within in (at_work._is_within_gap, at_work._is_well_within_gap):
        assert is_within(100.0, 100.0)
        assert not is_within(math.inf, 100.0), "no schedule is known"
    exact = searching(CHAIN, Offers())
    assert exact._is_within_gap(100.0, 100.0)
    assert not exact._is_within_gap(100.0, 99.0)


def test_eviction_goes_on_for_a_while_where_the_gap_is_reached(clock: SimpleNamespace) -> None:
    """For three hundredths of the time."""
    at_work = searching(CHAIN, Offers(), replace(EXACT, gap=0.2, time_limit=1000.0))
    clock.at = 529.0
    assert not at_work._is_enough(100.0, 85.0, 500.0)
    assert at_work._is_enough(100.0, 99.0, 500.0)
    clock.at = 531.0
    assert at_work._is_enough(100.0, 85.0, 500.0)
    assert not at_work._is_enough(100.0, 75.0, 500.0)


def test_a_part_of_the_search_ends_after_its_share_of_what_is_left(
    clock: SimpleNamespace,
) -> None:
    cancel = threading.Event()
    at_work = searching(CHAIN, Offers(), replace(EXACT, time_limit=1000.0), cancel=cancel)
    end = at_work.programs.deadline

    def ends(left_s: float, share: float) -> bool:
        clock.at = end - 400.0
        stop = at_work._stop_after(share)
        clock.at = end - left_s
        return stop()

    assert at_work._left_s() == end
    assert not ends(301.0, 0.25)
    assert ends(299.0, 0.25)
    assert not ends(0.5, 2.0)
    assert ends(-0.5, 2.0), "the search's own end"
    cancel.set()
    assert ends(301.0, 0.25)
