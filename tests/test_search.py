"""The search itself: when it asks a program, what it offers it, and what it says is proved."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
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
from remat.heuristics.local_search import Rated
from remat.heuristics.polish import polish
from remat.milp import slots
from remat.milp.backends import Outcome
from remat.milp.slots import Slots
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.strategies import Auto, Task
from remat.strategies.search import deadline as clocks
from remat.strategies.search import pipeline
from remat.strategies.search.deadline import Clock
from remat.strategies.search.runner import MilpRunner
from remat.strategies.search.search import search
from remat.strategies.search.state import Known, OverSlots
from remat.strategies.search.step import run
from remat.strategies.search.steps import eviction
from remat.strategies.search.steps.feasibility import reach

EXACT = Auto(threads=1, gap=0.0, peak_gap=0.0, stall=math.inf, time_limit=300.0)
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

    def __call__(
        self, graph: Graph, known: Sequence[Schedule], affordable_s: float, _: int
    ) -> Slots:
        self.asked.append((list(known), affordable_s))
        if self.is_complete:
            return slots.complete(graph, affordable_s)
        return slots.recombined(graph, known, region=1)


def known_of(
    graph: Graph,
    offers: Offers,
    budget_bytes: int | None = None,
    options: Auto = EXACT,
    **given: Any,
) -> Known:
    return Known(Task(graph, budget_bytes, **given), options, offers)


def least_cost(
    graph: Graph, offers: Offers, budget_bytes: int, *given: Auto, **more: Any
) -> Solution:
    return search(known_of(graph, offers, budget_bytes, *given, **more), pipeline.exact())


def least_peak(graph: Graph, offers: Offers, *given: Auto, **more: Any) -> Solution:
    return search(known_of(graph, offers, None, *given, **more), pipeline.exact())


def reached(graph: Graph, offers: Offers, budget_bytes: int, *given: Auto, **more: Any) -> Schedule:
    known = known_of(graph, offers, budget_bytes, *given, **more)
    steps = pipeline.exact()
    reach(steps.peak, steps.nearest, known, known.clock)
    return known.best


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
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: found.at))
    return found


# -- the least cost -------------------------------------------------------------------------------


def test_what_fits_as_it_is_needs_no_program() -> None:
    offers = Offers()
    for budget_bytes in (9, 10):
        found = least_cost(CHAIN, offers, budget_bytes)
        assert found.schedule == Schedule.keep_all(CHAIN)
        assert (found.bound, found.bound_scope, found.proved) == (16.0, "all orders", True)
    assert offers.asked == []
    assert len(least_cost(CHAIN, offers, 8).schedule) > 16


def test_less_than_some_operation_needs_is_proved_infeasible() -> None:
    offers = Offers()
    with pytest.raises(InfeasibleBudget, match="one operation needs 3 bytes with what") as error:
        least_cost(CHAIN, offers, 2)
    assert error.value.is_proved
    assert error.value.min_feasible_bytes == 3
    assert offers.asked == []
    assert peak(CHAIN, least_cost(CHAIN, offers, 3).schedule) == 3


def test_what_the_bound_proves_needs_no_program() -> None:
    offers = Offers()
    dear = least_cost(CHAIN, Offers(), 3).schedule
    found = least_cost(CHAIN, offers, 5, replace(EXACT, gap=1e-3), start=dear)
    assert offers.asked == []
    assert time_s(CHAIN, found.schedule) == 20.0
    assert found.bound == pytest.approx(20.0)
    assert (found.bound_scope, found.proved) == ("order", True)


def test_the_program_begins_from_the_cheapest_that_is_known() -> None:
    """And is offered no operation that costs more than what is known is dearer."""
    offers = Offers()
    found = least_cost(CHAIN, offers, 4)
    (((known,), affordable_s),) = offers.asked
    assert affordable_s == pytest.approx(time_s(CHAIN, known) - CHAIN.total_cost_s)
    assert time_s(CHAIN, found.schedule) == 23.0
    assert found.proved
    assert "slots_bound" not in found.stats


def test_where_the_program_fails_the_cheapest_that_is_known_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, offers = uneven_stages(0, 14), Offers()
    monkeypatch.setattr(MilpRunner, "solve_cost", failing)
    at_work = known_of(graph, offers, 115)
    with pytest.warns(SolverWarning, match="program"):
        found = search(at_work, pipeline.exact())
    (((known,), _),) = offers.asked
    times = [rated.time_s for rated in at_work.rated]
    assert len(times) > 1
    assert times == sorted(times)
    assert time_s(graph, known) == times[0] < times[-1]
    assert found.schedule == known
    assert not found.proved


def test_a_bound_over_some_slots_is_a_share_beside_that_of_the_order() -> None:
    offers = Offers(is_complete=False)
    found = least_cost(CHAIN, offers, 4)
    assert found.bound == pytest.approx(21.0)
    assert found.stats["slots_bound"] == pytest.approx(23 / 16 - 1)
    assert not found.proved


def test_a_schedule_over_few_slots_may_meet_the_bound_of_the_order() -> None:
    """A program finds 23 s where 30 s were known, and the bound for the order is 21 s."""
    offers, loose = Offers(is_complete=False), replace(EXACT, gap=0.1)
    dear = Schedule.of([*range(8), *range(7), *range(7), *range(8, 16)])
    at_work = known_of(CHAIN, offers, 4, loose, start=dear)
    run(pipeline.exact().cost[:1], at_work)
    assert not at_work.is_within_gap
    at_work.offer([least_cost(CHAIN, Offers(), 4).schedule])
    assert at_work.is_within_gap
    assert at_work.bound == pytest.approx(21.0)


def test_schedules_are_kept_in_the_order_of_their_time() -> None:
    """If they fit, once each, without what nobody reads, with as much kept as there is room for."""
    at_work = known_of(CHAIN, Offers(), 5)
    cheap, dear = (least_cost(CHAIN, Offers(), budget).schedule for budget in (5, 3))
    better = polish(CHAIN, dear, 5)
    assert time_s(CHAIN, cheap) < time_s(CHAIN, better) < time_s(CHAIN, dear)
    wasteful = Schedule.of([*dear.runs, 0])
    at_work.offer([dear, Schedule.keep_all(CHAIN), cheap, wasteful, cheap])
    assert at_work.schedules == [cheap, better]
    assert at_work.objective == time_s(CHAIN, cheap)
    small = at_work.smallest()
    small.offer([cheap, dear])
    assert small.best == dear
    assert small.objective == 3


def test_what_fits_only_with_nothing_set_aside_may_be_the_best() -> None:
    at_work = known_of(CHAIN, Offers(), 5)
    cheap, dear = (least_cost(CHAIN, Offers(), budget).schedule for budget in (5, 3))
    at_work.set_aside(replace(CHAIN), 4)
    at_work.offer([dear, cheap])
    assert at_work.best == polish(CHAIN, dear, 4)
    assert at_work.best_of_all() == (cheap, time_s(CHAIN, cheap))


def test_a_program_over_all_slots_that_ends_is_a_proof(cancelled: threading.Event) -> None:
    """Also where its bound is less than the time by what it rounds. One that did not is none."""
    found = least_cost(STAGES, Offers(), 57)
    assert found.bound == pytest.approx(time_s(STAGES, found.schedule))
    assert found.proved
    found = least_cost(STAGES, Offers(), 57, cancel=cancelled)
    assert found.bound is not None
    assert found.bound < time_s(STAGES, found.schedule)
    assert not found.proved


def test_where_eviction_fails_what_is_known_and_fits_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = least_cost(CHAIN, Offers(), 3).schedule
    large = least_cost(CHAIN, Offers(), 8).schedule
    monkeypatch.setattr(eviction, "fitting", failing)
    offers = Offers()
    with pytest.warns(SolverWarning, match="eviction"):
        least_cost(CHAIN, offers, 4, start=small)
    assert offers.asked[0][0] == [polish(CHAIN, small, 4)]
    at_work = known_of(CHAIN, Offers(), 4, start=large)
    assert at_work.schedules == []


def test_a_start_is_one_in_the_graph_s_order() -> None:
    keep_all = Schedule.keep_all(CHAIN)
    branches = uneven_stages(0, 4)
    swapped = Schedule.of([1, 0, *range(2, len(branches))])
    assert known_of(CHAIN, Offers()).start is None
    assert known_of(CHAIN, Offers(), start=keep_all).start is keep_all
    assert known_of(branches, Offers(), start=swapped).start is None


# -- the smallest peak ----------------------------------------------------------------------------


def test_a_peak_that_some_operation_needs_is_proved_without_a_program() -> None:
    offers = Offers()
    found = least_peak(CHAIN, offers)
    assert peak(CHAIN, found.schedule) == 3
    assert (found.bound, found.bound_scope, found.proved) == (3.0, "order", True)
    assert offers.asked == []


@pytest.mark.parametrize("seed", [1, 2])
def test_the_smallest_peak_is_proved_by_a_program_over_all_slots(seed: int) -> None:
    graph, offers = uneven_stages(seed, 10), Offers()
    found = least_peak(graph, offers)
    assert found.proved
    assert found.bound == pytest.approx(peak(graph, found.schedule))
    ((_, affordable_s),) = offers.asked
    assert affordable_s == math.inf


def test_few_slots_prove_no_smallest_peak() -> None:
    offers = Offers(is_complete=False)
    found = least_peak(STAGES, offers)
    assert len(offers.asked) == 1
    assert peak(STAGES, found.schedule) > 48
    assert (found.bound, found.proved) == (39.0, False)


def test_a_cancelled_search_asks_no_program(cancelled: threading.Event) -> None:
    """It has what it began from."""
    offers = Offers()
    start = least_peak(STAGES, offers).schedule
    offers.asked.clear()
    found = least_peak(STAGES, offers, start=start, cancel=cancelled)
    assert offers.asked == []
    assert found.schedule == start
    assert (found.bound, found.proved) == (39.0, False)
    found = least_peak(STAGES, offers, cancel=cancelled)
    assert found.schedule == Schedule.keep_all(STAGES)


def test_a_peak_is_small_within_its_gap() -> None:
    """Of its bound, 30 bytes; or of a target."""
    graph = chain(8, size=10)
    strict, loose = (
        known_of(graph, Offers(), None, replace(EXACT, peak_gap=gap)) for gap in (0.0, 0.5)
    )
    assert [strict.is_enough(size) for size in (30, 31, 60)] == [True, False, False]
    assert [loose.is_enough(size) for size in (30, 45, 46)] == [True, True, False]
    aimed = loose.smallest(target_bytes=35)
    assert [aimed.is_enough(size) for size in (35, 36)] == [True, False]


# -- budgets that are hard to meet ----------------------------------------------------------------


def test_what_eviction_reaches_needs_no_program() -> None:
    offers = Offers()
    for budget_bytes in (54, 60):
        found = reached(STAGES, offers, budget_bytes)
        assert peak(STAGES, found) <= budget_bytes
    assert offers.asked == []


@pytest.mark.parametrize("budget_bytes", [48, 50])
def test_what_eviction_does_not_reach_is_asked_of_a_program(budget_bytes: int) -> None:
    offers = Offers()
    found = reached(STAGES, offers, budget_bytes)
    assert peak(STAGES, found) <= budget_bytes
    ((_, affordable_s),) = offers.asked
    assert affordable_s == math.inf


@pytest.mark.parametrize("peak_gap", [0.0, 1e-4])
def test_what_a_program_over_all_slots_excludes_is_proved_infeasible(peak_gap: float) -> None:
    with pytest.raises(InfeasibleBudget, match="no schedule of this order") as error:
        least_cost(STAGES, Offers(), 47, replace(EXACT, peak_gap=peak_gap))
    assert error.value.is_proved
    assert error.value.min_feasible_bytes == 48


def test_a_byte_too_little_among_many_is_proved_infeasible() -> None:
    """Where the difference is less than what the solver rounds: by an optimum, not by a bound."""
    values = tuple(Value(v.name, v.size_bytes << 24) for v in STAGES.values)
    large = replace(STAGES, values=values)
    with pytest.raises(InfeasibleBudget) as error:
        least_cost(large, Offers(), (48 << 24) - 1)
    assert error.value.is_proved


def test_what_few_slots_do_not_hold_is_not_proved_infeasible() -> None:
    with pytest.raises(InfeasibleBudget, match="no proof that there is none") as error:
        least_cost(STAGES, Offers(is_complete=False), 50)
    assert not error.value.is_proved
    smallest_bytes = error.value.min_feasible_bytes
    assert smallest_bytes is not None
    assert 50 < smallest_bytes <= 54


def test_a_peak_within_its_gap_excludes_no_smaller_one() -> None:
    """These peaks can be reached; a program that may be off by half of it often ends before."""
    refused = []
    for seed, least_bytes in ((1, 54), (3, 70), (6, 62), (7, 50), (9, 61)):
        graph = uneven_stages(seed, 12)
        try:
            schedule = reached(graph, Offers(), least_bytes, replace(EXACT, peak_gap=0.5))
            assert peak(graph, schedule) == least_bytes
        except InfeasibleBudget as error:
            refused.append(error)
    assert refused, "some solvers find more of them than others"
    assert all("no proof that there is none" in str(error) for error in refused)
    assert not any(error.is_proved for error in refused)


def test_what_there_was_no_time_for_is_not_proved_infeasible() -> None:
    """A tenth of a second is the least that a solver has, and far too little for this."""
    graph = chain(40)
    with pytest.raises(SolverTimeout, match="not excluded that there is one"):
        reached(graph, Offers(), 3, replace(EXACT, time_limit=1e-6))


def test_a_cancelled_search_without_a_schedule_has_no_answer(cancelled: threading.Event) -> None:
    with pytest.raises(RematError, match="cancelled before any schedule was known"):
        reached(STAGES, Offers(), 50, cancel=cancelled)


def test_a_failed_solver_is_named_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)
    with pytest.raises(SolverError, match="the smallest peak found is 54 bytes"):
        reached(STAGES, Offers(), 50)
    found = least_peak(STAGES, Offers())
    assert (found.bound, found.proved) == (39.0, False)


# -- gaps and time --------------------------------------------------------------------------------


def test_what_is_within_the_gap() -> None:
    """Of total time; and well within is a tenth of it."""

    def at_bound(gap: float, bound_s: float) -> Known:
        at_work = known_of(CHAIN, Offers(), 5, replace(EXACT, gap=gap))
        at_work.over_slots = OverSlots(Outcome.FEASIBLE, bound_s, True)
        return at_work

    assert at_bound(0.2, 80.0).is_enough(100.0)
    for bound_s in (79.0, 50.0, 1.0):
        assert not at_bound(0.2, bound_s).is_enough(100.0)
    assert at_bound(0.2, 98.0).is_enough(100.0, 0.1)
    assert not at_bound(0.2, 97.0).is_enough(100.0, 0.1)
    for share in (1.0, 0.1):
        assert at_bound(0.2, 100.0).is_enough(100.0, share)
        assert not at_bound(0.2, 100.0).is_enough(math.inf, share), "no schedule is known"
    assert at_bound(0.0, 100.0).is_enough(100.0)
    assert not at_bound(0.0, 99.0).is_enough(100.0)


def test_eviction_goes_on_for_a_while_where_the_gap_is_reached(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For three hundredths of the time."""
    at_work = known_of(CHAIN, Offers(), 5, replace(EXACT, gap=0.2, time_limit=1000.0))
    at_work.over_slots = OverSlots(Outcome.FEASIBLE, 85.0, True)
    answers: list[bool] = []

    def fitting(*_: object, enough: Callable[[float], bool], **__: object) -> list[Rated]:
        for clock.at, time_s in ((529.0, 100.0), (529.0, 86.0), (531.0, 100.0), (531.0, 110.0)):
            answers.append(enough(time_s))
        return []

    monkeypatch.setattr(eviction, "fitting", fitting)
    clock.at = 500.0
    eviction.evict(at_work, at_work.clock.share(0.5))
    assert answers == [False, True, True, False]


def test_a_part_of_the_search_ends_after_its_share_of_what_is_left(clock: SimpleNamespace) -> None:
    cancel = threading.Event()
    whole = Clock.of(1000.0, cancel)
    end = whole.left_s

    def ends(left_s: float, share: float) -> bool:
        clock.at = end - 400.0
        part = whole.share(share)
        clock.at = end - left_s
        return part.is_over()

    assert 900 < end < 1000
    assert not ends(301.0, 0.25)
    assert ends(299.0, 0.25)
    assert not ends(0.5, 2.0)
    assert ends(-0.5, 2.0), "the search's own end"
    also = threading.Event()
    part = whole.unless(also)
    clock.at = end - 400.0
    assert not part.is_over()
    also.set()
    assert part.is_over()
    assert not whole.is_over()
    cancel.set()
    assert ends(301.0, 0.25)
