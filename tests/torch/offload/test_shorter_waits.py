"""Copies are moved where a solved schedule waits for them and the budget has room."""

from __future__ import annotations

import pytest
from tests.helpers.training.offloaded_steps import (
    FAST,
    assert_eager_numbers,
    host_stays,
    measured,
    net_case,
)

import remat
from remat.allocator.prediction import with_prediction
from remat.choice.offloadable_step import PlannedStays, TraceStep
from remat.costs.devices import Link
from remat.documents.trace import Trace
from remat.passes.offload.copies import copy_times, offloaded_values
from remat.passes.offload.shorter_waits import with_shorter_waits
from remat.schedule import Schedule
from remat.simulate import simulate

SLOW = Link(1e12, 3e9)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return with_late_copies(measured(net_case())).trace


def with_late_copies(trace: Trace) -> TraceStep:
    """Return a step in which copies back start as late as for a fast link."""
    stays = host_stays(trace, of_backward=True)
    return TraceStep(trace).with_stays(PlannedStays(tuple(stays), {}), FAST)


def waiting_s(trace: Trace, schedule: Schedule) -> float:
    return copy_times(trace.graph(), schedule.runs, SLOW).waiting_s


@pytest.mark.parametrize("room", [0.02, 0.1, 1.0])
def test_the_step_waits_less_within_the_budget(trace: Trace, room: float) -> None:
    graph = trace.graph()
    late = Schedule.keep_all(graph)
    peak_bytes = simulate(graph, late).peak_bytes
    budget_bytes = int((1 + room) * peak_bytes)
    earlier = with_shorter_waits(graph, late, budget_bytes, SLOW)
    assert waiting_s(trace, earlier) < waiting_s(trace, late)
    assert simulate(graph, earlier).peak_bytes <= budget_bytes
    before, after = (copy_times(graph, s.runs, SLOW) for s in (late, earlier))
    assert after.largest_host_bytes <= before.largest_host_bytes
    reloads = {o.reload for o in offloaded_values(graph)}
    others = [[op for op in s.runs if op not in reloads] for s in (late, earlier)]
    assert others[0] == others[1], "nothing else moves"


@pytest.mark.parametrize("room", [0.02, 0.1, 1.0])
def test_memory_is_freed_later_while_its_copy_runs(trace: Trace, room: float) -> None:
    graph, link = trace.graph(), Link(3e9, 1e12)
    early = Schedule.keep_all(graph)
    budget_bytes = int((1 + room) * simulate(graph, early).peak_bytes)
    later = with_shorter_waits(graph, early, budget_bytes, link)
    assert simulate(graph, later).peak_bytes <= budget_bytes
    before, after = (copy_times(graph, s.runs, link) for s in (early, later))
    assert after.waiting_s < before.waiting_s
    assert after.largest_host_bytes <= before.largest_host_bytes
    releases = {o.release for o in offloaded_values(graph)}
    orders = [[op for op in s.runs if op not in releases] for s in (early, later)]
    assert orders[0] == orders[1], "nothing else moves"
    position = {op: run for run, op in enumerate(later.runs)}
    assert graph.boundary is not None
    for o in offloaded_values(graph):
        assert position[o.offload] < position[o.release] < position[o.reload]
        is_forward = early.runs.index(o.release) < early.runs.index(graph.boundary)
        assert is_forward == (position[o.release] < position[graph.boundary])


def test_nothing_moves_where_nothing_waits_or_fits(trace: Trace) -> None:
    graph = trace.graph()
    late = Schedule.keep_all(graph)
    instant = Link(1e18, 1e18)
    assert with_shorter_waits(graph, late, 1 << 40, instant) is late
    assert with_shorter_waits(graph, late, graph.constant_bytes, SLOW) is late
    without = measured(net_case()).graph()
    schedule = Schedule.keep_all(without)
    assert with_shorter_waits(without, schedule, 1 << 40, SLOW) is schedule


def test_on_a_gpu_the_allocator_has_to_stay_within_the_budget() -> None:
    """The simulator counts bytes of tensors, the allocator blocks and segments."""
    step = with_late_copies(measured(net_case(), "h100"))
    graph = step.graph()
    late = Schedule.keep_all(graph)
    plan = with_prediction(remat.solve(graph, simulate(graph, late).peak_bytes), step.trace)
    earlier = with_shorter_waits(graph, plan.schedule, 1 << 40, SLOW)
    assert not earlier.keeps_order()
    assert step.with_schedule(plan, earlier) is None
    unchanged = step.with_schedule(plan, plan.schedule)
    assert unchanged is not None
    assert unchanged.stats == plan.stats


@pytest.mark.parametrize("link", [SLOW, Link(3e9, 1e12)])
def test_a_moved_copy_changes_no_number(trace: Trace, link: Link) -> None:
    case = net_case()
    earlier = with_shorter_waits(trace.graph(), Schedule.keep_all(trace.graph()), 1 << 40, link)
    assert not earlier.keeps_order()
    assert_eager_numbers(trace, case, earlier)
