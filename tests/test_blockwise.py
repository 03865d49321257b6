"""Blocks that share a budget: the peak of a step of blocks, the choice of their ways, the menu."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import training_graphs

from remat.blockwise.choose import choose
from remat.blockwise.menu import efficient, menu, tangent_bytes, way_of, with_room
from remat.blockwise.step import BlockStep, Event, Way
from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import simulate


@st.composite
def ways(draw: st.DrawFn) -> Way:
    saved = draw(st.integers(0, 20))
    return Way(
        time_s=draw(st.integers(1, 30)) / 10,
        saved_bytes=saved,
        forward_bytes=saved + draw(st.integers(0, 10)),
        backward_bytes=saved + draw(st.integers(0, 20)),
    )


@st.composite
def steps(draw: st.DrawFn) -> BlockStep:
    """Up to four calls, one inside of the other as in a step, with something outside between."""
    calls = draw(st.lists(st.lists(ways(), min_size=1, max_size=3).map(tuple), max_size=4))
    order = [("forward", c) for c in range(len(calls))]
    order += [("backward", c) for c in reversed(range(len(calls)))]
    events: list[Event] = []
    for kind, call in order:
        events.append(Event("outside", draw(st.integers(0, 30))))
        events.append(Event(kind, draw(st.integers(0, 30)), call))  # type: ignore[arg-type]
    in_flight, outside = draw(st.sampled_from(((1, 0), (1, 5), (3, 2))))
    events.append(Event("outside", draw(st.integers(0, 30))))
    return BlockStep(tuple(calls), tuple(events), in_flight, outside)


def brute(step: BlockStep) -> list[tuple[int, float]]:
    """Peak and time of every choice."""
    every = itertools.product(*(range(len(options)) for options in step.calls))
    return [(peak_by_hand(step, chosen), step.time_s(chosen)) for chosen in every]


def peak_by_hand(step: BlockStep, chosen: tuple[int, ...]) -> int:
    """From who is in flight at each event, event by event."""
    sums: list[int] = []
    pairs = zip(step.calls, chosen, strict=True)
    others = step.outside_bytes + sum(options[way].saved_bytes for options, way in pairs)
    others *= step.in_flight - 1
    for number, event in enumerate(step.events):
        before = step.events[:number]
        flying = {e.call for e in before if e.kind == "forward"}
        flying -= {e.call for e in step.events[: number + 1] if e.kind == "backward"}
        own = sum(step.calls[c][chosen[c]].saved_bytes for c in flying)
        sums.append(event.held_bytes + others + own)
        if event.kind == "forward":
            sums[-1] += step.calls[event.call][chosen[event.call]].forward_bytes
        if event.kind == "backward":
            sums[-1] += step.calls[event.call][chosen[event.call]].backward_bytes
    return max(sums)


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 150))
def test_the_cheapest_ways_that_fit_are_chosen(step: BlockStep, budget_bytes: int) -> None:
    every = brute(step)
    least_bytes = min(peak for peak, _ in every)
    if budget_bytes < least_bytes:
        with pytest.raises(InfeasibleBudget) as raised:
            choose(step, budget_bytes)
        assert raised.value.min_feasible_bytes == least_bytes
        return
    choice = choose(step, budget_bytes)
    assert step.peak_bytes(choice.ways) == peak_by_hand(step, choice.ways) <= budget_bytes
    best_s = min(time_s for peak, time_s in every if peak <= budget_bytes)
    assert step.time_s(choice.ways) == pytest.approx(best_s, rel=2e-3)
    assert choice.bound_s <= best_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(steps(), st.integers(0, 150))
def test_calls_that_are_tied_run_in_one_way(step: BlockStep, budget_bytes: int) -> None:
    count = min((len(options) for options in step.calls), default=0)
    step = replace(step, calls=tuple(options[:count] for options in step.calls))
    tied = [max(0, call - 2) for call in range(len(step.calls))]  # 0, 0, 0, 1
    every = itertools.product(*(range(count) for _ in step.calls))
    allowed = [c for c in every if all(c[i] == c[other] for i, other in enumerate(tied))]
    found = [(peak_by_hand(step, chosen), step.time_s(chosen)) for chosen in allowed]
    fitting = [time_s for peak, time_s in found if peak <= budget_bytes]
    if not fitting:
        with pytest.raises(InfeasibleBudget):
            choose(step, budget_bytes, tied=tied)
        return
    chosen = choose(step, budget_bytes, tied=tied).ways
    assert chosen in allowed
    assert step.peak_bytes(chosen) <= budget_bytes
    assert step.time_s(chosen) == pytest.approx(min(fitting), rel=2e-3)


@settings(max_examples=30, deadline=None)
@given(steps())
def test_without_a_budget_the_peak_is_the_smallest(step: BlockStep) -> None:
    least_bytes = min(peak for peak, _ in brute(step))
    assert step.peak_bytes(choose(step, None).ways) <= 1.01 * least_bytes


@settings(max_examples=30, deadline=None)
@given(training_graphs())
def test_a_menu_says_what_its_schedules_take(graph: Graph) -> None:
    found = menu(graph, within_s=1.0)
    first = way_of(graph, Schedule.keep_all(graph))
    assert found[0][0].time_s == first.time_s
    for way, plan in found:
        timeline = simulate(graph, plan.schedule)
        assert way == way_of(graph, plan.schedule)
        assert way.time_s == pytest.approx(timeline.time_s)
        own_bytes = max(way.forward_bytes, way.backward_bytes)
        assert graph.constant_bytes + own_bytes <= timeline.peak_bytes
        assert way.saved_bytes + tangent_bytes(graph) <= way.backward_bytes
    for (a, _), (b, _) in itertools.permutations(found, 2):
        assert a.time_s < b.time_s or a.saved_bytes < b.saved_bytes or _peak(a) < _peak(b)


def _peak(way: Way) -> tuple[int, int]:
    return way.backward_bytes, way.forward_bytes


@settings(max_examples=30, deadline=None)
@given(training_graphs(), st.integers(0, 50))
def test_room_where_the_forward_ends_limits_what_is_saved(graph: Graph, room_bytes: int) -> None:
    asked = with_room(graph, room_bytes)
    schedule = Schedule.keep_all(graph)
    saved_bytes = way_of(graph, schedule).saved_bytes
    least_bytes = graph.constant_bytes + saved_bytes + tangent_bytes(graph) + room_bytes
    assert simulate(asked, schedule).peak_bytes >= least_bytes
    assert way_of(asked, schedule).saved_bytes == saved_bytes


def test_what_another_way_covers_is_left_out() -> None:
    better, worse, other = Way(1.0, 2, 3, 4), Way(1.0, 2, 3, 5), Way(2.0, 1, 3, 4)
    plans = [(w, None) for w in (other, worse, better)]
    assert [w for w, _ in efficient(plans)] == [better, other]  # type: ignore[arg-type]
