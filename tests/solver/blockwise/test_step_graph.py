"""The graph of a step of blocks has the peak and time of the step."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.graphs import training_graphs

from remat.blockwise.block_step import (
    AS_IT_IS,
    CHECKPOINTED,
    PLANNED,
    BlockOption,
    BlockStep,
    CallVariant,
    HostCopies,
    StepEvent,
    host_stays,
)
from remat.blockwise.pareto_options import (
    NEVER_FREED,
    HeldInput,
    SavedTensor,
    boundary_of,
    option_of_schedule,
)
from remat.blockwise.step_graph import BlockCall, schedule_of_step
from remat.costs.devices import Link
from remat.graph import Baseline
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.solve import solve

_SIZES = st.integers(0, 30)
_SECONDS = st.integers(1, 30).map(lambda tenths: tenths / 10)


@st.composite
def planned_calls(draw_from: st.DrawFn) -> BlockCall:
    """A call with a plan, which may hold an input until one of the runs of its backward."""
    graph = draw_from(training_graphs(renews=False))
    schedule = Schedule.keep_all(graph)
    if draw_from(st.booleans()):
        schedule = solve(graph, "min").schedule
    peak_bytes = simulate(graph, schedule).peak_bytes
    plan = Plan.of(graph, peak_bytes, Solution(schedule), {})
    option = option_of_schedule(graph, schedule)
    first_run = schedule.runs.index(boundary_of(graph)) + 1
    backward = simulate(graph, schedule).during_bytes[first_run:]
    inputs: tuple[HeldInput, ...] = ()
    if draw_from(st.booleans()) and backward:
        last_read = draw_from(st.sampled_from([NEVER_FREED, *range(len(backward))]))
        inputs = (HeldInput(draw_from(_SIZES), last_read),)
        peak_bytes = max(
            size + inputs[0].size_bytes * (run <= last_read) for run, size in enumerate(backward)
        )
        option = replace(
            option,
            saved_bytes=option.saved_bytes + inputs[0].size_bytes,
            backward_bytes=peak_bytes - graph.constant_bytes,
        )
    return BlockCall("block", "Block", PLANNED, option, option, plan, inputs=inputs)


@st.composite
def eager_calls(draw_from: st.DrawFn) -> BlockCall:
    """A call of a block in eager mode, which holds an input to the end of its backward."""
    input_bytes, saved_bytes = draw_from(_SIZES), draw_from(_SIZES)
    forward_s = draw_from(_SECONDS)
    baseline = BlockOption(
        forward_s + draw_from(_SECONDS),
        saved_bytes + input_bytes,
        saved_bytes + draw_from(_SIZES),
        saved_bytes + input_bytes + draw_from(_SIZES),
        forward_s,
    )
    inputs = (HeldInput(input_bytes, NEVER_FREED),)
    if draw_from(st.booleans()):
        return BlockCall("block", "Block", AS_IT_IS, baseline, baseline, inputs=inputs)
    saved_bytes = draw_from(st.integers(0, saved_bytes))
    option = BlockOption(
        baseline.time_s + forward_s,
        saved_bytes + input_bytes,
        saved_bytes + draw_from(_SIZES),
        saved_bytes + input_bytes + draw_from(_SIZES),
        forward_s,
    )
    return BlockCall("block", "Block", CHECKPOINTED, option, baseline, inputs=inputs)


def _with_offloaded(call: BlockCall) -> BlockCall:
    """Return the call that offloads one tensor: an input, or else a result that is saved."""
    if call.plan is None:
        return call
    if call.inputs:
        tensor = SavedTensor(0, call.inputs[0].size_bytes, input_index=0)
        return replace(call, offloaded=(tensor,)) if tensor.size_bytes else call
    graph, schedule = call.plan.graph, call.plan.schedule
    timeline, boundary_run = simulate(graph, schedule), schedule.runs.index(boundary_of(graph))
    for value, start, end in timeline.copies:
        is_saved = start < boundary_run < end < len(schedule)
        outputs = graph.operations[boundary_of(graph)].inputs
        if is_saved and value not in outputs:
            size_bytes = graph.values[value].size_bytes
            return replace(call, offloaded=(SavedTensor(0, size_bytes, value=value),))
    return call


@st.composite
def steps_of_calls(draw_from: st.DrawFn) -> tuple[BlockStep, list[BlockCall]]:
    """Some calls, nested as in a step; other code holds at least the inputs of a forward."""
    calls = draw_from(st.lists(st.one_of(planned_calls(), eager_calls()), max_size=3))
    order = [("forward", number) for number in range(len(calls))]
    backwards = [number for number in range(len(calls)) if draw_from(st.integers(0, 4))]
    order += [("backward", number) for number in reversed(backwards)]
    events = [StepEvent("outside", 10 + draw_from(_SIZES))]
    for kind, number in order:
        held_bytes = sum(item.size_bytes for item in calls[number].inputs)
        events.append(StepEvent(kind, 10 + held_bytes + draw_from(_SIZES), number))  # type: ignore[arg-type]
        events.append(StepEvent("outside", 10 + draw_from(_SIZES)))
    step = BlockStep(
        tuple((call.option,) for call in calls),
        tuple(events),
        *draw_from(st.sampled_from(((1, 0), (3, 2)))),
    )
    if draw_from(st.booleans()):
        stays = host_stays(step)
        calls = [_with_offloaded(c) if n in stays else c for n, c in enumerate(calls)]
        rate = draw_from(st.sampled_from((0.5, 10.0, 1e9)))
        copies = tuple((CallVariant(0, (0,), call.offloaded_bytes),) for call in calls)
        step = replace(step, host=HostCopies(copies, Link(rate, 2 * rate), handle_bytes=2))
    return step, calls


@settings(max_examples=40, deadline=None)
@hypothesis.given(steps_of_calls())
def test_the_graph_has_the_peak_and_time_of_the_step(
    example: tuple[BlockStep, list[BlockCall]],
) -> None:
    step, calls = example
    outcome = step.outcome(
        [
            CallVariant(0, (0,), call.offloaded_bytes) if call.offloaded else CallVariant(0)
            for call in calls
        ]
    )
    graph, schedule = schedule_of_step(step, calls, outcome, Baseline(1000, 1.0), 10)
    timeline = simulate(graph, schedule)
    assert timeline.peak_bytes == outcome.peak_bytes
    assert timeline.time_s == pytest.approx(outcome.time_s)
    result_bytes = sum(graph.values[v].size_bytes for v in graph.results)
    assert timeline.after_bytes[-1] == graph.constant_bytes + result_bytes
