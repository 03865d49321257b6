"""Blocks that share a budget: the peak of a step of blocks, the choice of their options, the
options of a block."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.graphs import training_graphs

from remat.blockwise.block_step import BlockOption, BlockStep, StepEvent
from remat.blockwise.choose import choose_options
from remat.blockwise.pareto_options import (
    option_of_schedule,
    pareto_optimal,
    pareto_options,
    tangent_bytes,
    with_boundary_workspace,
)
from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import simulate


@st.composite
def block_options(draw_from: st.DrawFn) -> BlockOption:
    saved = draw_from(st.integers(0, 20))
    return BlockOption(
        time_s=draw_from(st.integers(1, 30)) / 10,
        saved_bytes=saved,
        forward_bytes=saved + draw_from(st.integers(0, 10)),
        backward_bytes=saved + draw_from(st.integers(0, 20)),
    )


@st.composite
def steps(draw_from: st.DrawFn) -> BlockStep:
    """Up to four calls, nested as in a step, with external memory between."""
    calls = draw_from(
        st.lists(st.lists(block_options(), min_size=1, max_size=3).map(tuple), max_size=4)
    )
    order = [("forward", c) for c in range(len(calls))]
    order += [("backward", c) for c in reversed(range(len(calls)))]
    events: list[StepEvent] = []
    for kind, call in order:
        events.append(StepEvent("outside", draw_from(st.integers(0, 30))))
        events.append(StepEvent(kind, draw_from(st.integers(0, 30)), call))  # type: ignore[arg-type]
    in_flight, external = draw_from(st.sampled_from(((1, 0), (1, 5), (3, 2))))
    events.append(StepEvent("outside", draw_from(st.integers(0, 30))))
    return BlockStep(tuple(calls), tuple(events), in_flight, external)


def brute(step: BlockStep) -> list[tuple[int, float]]:
    """Return peak and time of every choice."""
    every = itertools.product(*(range(len(options)) for options in step.options_per_call))
    return [(peak_by_hand(step, chosen), step.time_s(chosen)) for chosen in every]


def peak_by_hand(step: BlockStep, chosen: tuple[int, ...]) -> int:
    """Return the peak, computed event by event from the batches that are in flight."""
    sums: list[int] = []
    pairs = zip(step.options_per_call, chosen, strict=True)
    others = step.non_block_bytes_per_batch + sum(
        options[option].saved_bytes for options, option in pairs
    )
    others *= step.in_flight - 1
    for number, event in enumerate(step.events):
        before = step.events[:number]
        flying = {e.call for e in before if e.kind == "forward"}
        flying -= {e.call for e in step.events[: number + 1] if e.kind == "backward"}
        saved_bytes = sum(step.options_per_call[c][chosen[c]].saved_bytes for c in flying)
        sums.append(event.non_block_bytes + others + saved_bytes)
        if event.kind == "forward":
            sums[-1] += step.options_per_call[event.call][chosen[event.call]].forward_bytes
        if event.kind == "backward":
            sums[-1] += step.options_per_call[event.call][chosen[event.call]].backward_bytes
    return max(sums)


@settings(max_examples=60, deadline=None)
@hypothesis.given(steps(), st.integers(0, 150))
def test_the_cheapest_options_that_fit_are_chosen(step: BlockStep, budget_bytes: int) -> None:
    every = brute(step)
    least_bytes = min(peak for peak, _ in every)
    if budget_bytes < least_bytes:
        with pytest.raises(InfeasibleBudget) as raised:
            choose_options(step, budget_bytes)
        assert raised.value.min_feasible_bytes == least_bytes
        return
    choice = choose_options(step, budget_bytes)
    assert (
        step.peak_bytes(choice.option_indices)
        == peak_by_hand(step, choice.option_indices)
        <= budget_bytes
    )
    best_s = min(time_s for peak, time_s in every if peak <= budget_bytes)
    assert step.time_s(choice.option_indices) == pytest.approx(best_s, rel=2e-3)
    assert choice.bound_s <= best_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@hypothesis.given(steps(), st.integers(0, 150))
def test_tied_calls_get_the_same_option(step: BlockStep, budget_bytes: int) -> None:
    count = min((len(options) for options in step.options_per_call), default=0)
    step = replace(
        step, options_per_call=tuple(options[:count] for options in step.options_per_call)
    )
    tied = [max(0, call - 2) for call in range(len(step.options_per_call))]  # 0, 0, 0, 1
    every = itertools.product(*(range(count) for _ in step.options_per_call))
    allowed = [c for c in every if all(c[i] == c[other] for i, other in enumerate(tied))]
    feasible = [(peak_by_hand(step, chosen), step.time_s(chosen)) for chosen in allowed]
    fitting = [time_s for peak, time_s in feasible if peak <= budget_bytes]
    if not fitting:
        with pytest.raises(InfeasibleBudget):
            choose_options(step, budget_bytes, tied=tied)
        return
    chosen = choose_options(step, budget_bytes, tied=tied).option_indices
    assert chosen in allowed
    assert step.peak_bytes(chosen) <= budget_bytes
    assert step.time_s(chosen) == pytest.approx(min(fitting), rel=2e-3)


@settings(max_examples=30, deadline=None)
@hypothesis.given(steps())
def test_without_a_budget_the_smallest_peak_is_chosen(step: BlockStep) -> None:
    least_bytes = min(peak for peak, _ in brute(step))
    assert step.peak_bytes(choose_options(step, None).option_indices) <= 1.01 * least_bytes


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@hypothesis.given(training_graphs())
def test_options_have_the_time_and_bytes_of_their_schedules(graph: Graph) -> None:
    menu = pareto_options(graph, time_limit_s=1.0)
    first = option_of_schedule(graph, Schedule.keep_all(graph))
    assert menu[0][0].time_s == first.time_s
    for option, plan in menu:
        timeline = simulate(graph, plan.schedule)
        assert option == option_of_schedule(graph, plan.schedule)
        assert option.time_s == pytest.approx(timeline.time_s)
        own_bytes = max(option.forward_bytes, option.backward_bytes)
        assert graph.constant_bytes + own_bytes <= timeline.peak_bytes
        assert option.saved_bytes + tangent_bytes(graph) <= option.backward_bytes
    for (a, _), (b, _) in itertools.permutations(menu, 2):
        assert a.time_s < b.time_s or a.saved_bytes < b.saved_bytes or _peak(a) < _peak(b)


def _peak(option: BlockOption) -> tuple[int, int]:
    return option.backward_bytes, option.forward_bytes


@settings(max_examples=30, deadline=None)
@hypothesis.given(training_graphs(), st.integers(0, 50))
def test_workspace_at_the_boundary_limits_the_saved_bytes(graph: Graph, room_bytes: int) -> None:
    with_workspace = with_boundary_workspace(graph, room_bytes)
    schedule = Schedule.keep_all(graph)
    saved_bytes = option_of_schedule(graph, schedule).saved_bytes
    least_bytes = graph.constant_bytes + saved_bytes + tangent_bytes(graph) + room_bytes
    assert simulate(with_workspace, schedule).peak_bytes >= least_bytes
    assert option_of_schedule(with_workspace, schedule).saved_bytes == saved_bytes


def test_dominated_options_are_left_out() -> None:
    better, worse, other = (
        BlockOption(1.0, 2, 3, 4),
        BlockOption(1.0, 2, 3, 5),
        BlockOption(2.0, 1, 3, 4),
    )
    plans = [(w, None) for w in (other, worse, better)]
    assert [w for w, _ in pareto_optimal(plans)] == [better, other]  # type: ignore[arg-type]
