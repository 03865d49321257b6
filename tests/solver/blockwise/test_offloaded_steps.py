"""Blocks that offload: memory, waiting and time of a step by hand, and the best of all choices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.solver.blockwise.test_blockwise import steps

from remat.blockwise.block_step import (
    BlockOption,
    BlockStep,
    CallHostStay,
    CallVariant,
    HostCopies,
    StepEvent,
    StepOutcome,
    host_stays,
    useful_variants,
)
from remat.blockwise.choose import OptionChoice, choose_options, minimum_peak_bytes
from remat.costs.devices import Link
from remat.errors import InfeasibleBudget


@st.composite
def offloaded_steps(draw_from: st.DrawFn) -> BlockStep:
    """Up to four calls whose options offload nothing, a half or all of what they save."""
    step = draw_from(steps())
    options_per_call = tuple(
        tuple(
            BlockOption(
                o.time_s, o.saved_bytes, o.forward_bytes, o.backward_bytes,
                o.time_s * draw_from(st.sampled_from((0.0, 0.25, 0.5))),
            )
            for o in options
        )
        for options in step.options_per_call
    )  # fmt: skip
    step = BlockStep(options_per_call, step.events, step.in_flight, step.non_block_bytes_per_batch)
    stays = host_stays(step)
    variants = tuple(
        tuple(
            CallVariant(index, tuple(range(count)), option.saved_bytes * count // 2)
            for index, option in enumerate(options)
            for count in ((0, 1, 2) if call in stays else (0,))
        )
        for call, options in enumerate(options_per_call)
    )
    link = Link(
        draw_from(st.sampled_from((5.0, 20.0, 1e6))), draw_from(st.sampled_from((5.0, 1e6)))
    )
    host_bytes = draw_from(st.sampled_from((None, 0, 15, 40)))
    handle_bytes = draw_from(st.sampled_from((0, 1)))
    return replace(step, host=HostCopies(variants, link, host_bytes, handle_bytes))


def outcome_by_hand(step: BlockStep, chosen: tuple[CallVariant, ...]) -> StepOutcome:
    """Return the outcome from closed formulas: what is on the host during each event, and the
    waiting of each copy beyond the one call that hides it."""
    assert step.host is not None
    link = step.host.link
    options = [
        BlockOption(
            o.time_s, o.saved_bytes + size, o.forward_bytes + size, o.backward_bytes + size,
            o.forward_s,
        )
        for c, v in enumerate(chosen)
        for o in [step.options_per_call[c][v.option]]
        for size in [step.host.handle_bytes * len(v.tensors)]
    ]  # fmt: skip
    remaining = [o.saved_bytes - v.size_bytes for o, v in zip(options, chosen, strict=True)]
    place = {(e.kind, e.call): n for n, e in enumerate(step.events)}
    stays = host_stays(step)
    peak = 0
    for n, event in enumerate(step.events):
        size = event.non_block_bytes + (step.in_flight - 1) * (
            step.non_block_bytes_per_batch + sum(remaining)
        )
        for c, option in enumerate(options):
            if not place["forward", c] < n < place["backward", c]:
                continue
            is_away = c in stays and (
                place["forward", stays[c].released_after]
                < n
                < place["backward", stays[c].reloaded_before]
            )
            size += remaining[c] if is_away else option.saved_bytes
        if event.kind == "forward":
            size += options[event.call].forward_bytes
        if event.kind == "backward":
            size += options[event.call].backward_bytes
        peak = max(peak, size)
    waiting = copies = 0.0
    for c, variant in enumerate(chosen):
        if variant.size_bytes:
            hiding = options[stays[c].released_after].forward_s
            other = options[stays[c].reloaded_before]
            leaving_s = variant.size_bytes / link.to_host_bytes_per_s
            back = variant.size_bytes / link.to_device_bytes_per_s
            waiting += max(0.0, leaving_s - hiding) + max(
                0.0, back - other.time_s + other.forward_s
            )
            copies += leaving_s + back
    time = sum(o.time_s for o in options) + waiting
    host = step.in_flight * sum(v.size_bytes for v in chosen)
    return StepOutcome(peak, time, waiting, copies, host)


def brute(step: BlockStep) -> list[StepOutcome]:
    """Return the outcomes of all choices that the host has room for."""
    assert step.host is not None
    every = itertools.product(*step.host.variants_per_call)
    outcomes = [outcome_by_hand(step, chosen) for chosen in every]
    room = step.host.host_bytes
    return [o for o in outcomes if room is None or o.host_bytes <= room]


def assert_is(actual: StepOutcome, expected: StepOutcome) -> None:
    assert (actual.peak_bytes, actual.host_bytes) == (expected.peak_bytes, expected.host_bytes)
    assert actual.time_s == pytest.approx(expected.time_s)
    assert actual.waiting_s == pytest.approx(expected.waiting_s, abs=1e-9)
    assert actual.copies_s == pytest.approx(expected.copies_s)


def check(step: BlockStep, choice: OptionChoice, budget_bytes: int) -> None:
    assert_is(choice.outcome, outcome_by_hand(step, choice.variants))
    assert choice.outcome.peak_bytes <= budget_bytes
    if step.host is not None and step.host.host_bytes is not None:
        assert choice.outcome.host_bytes <= step.host.host_bytes


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@hypothesis.given(offloaded_steps(), st.integers(0, 150))
def test_the_choice_is_the_best_of_all(step: BlockStep, budget_bytes: int) -> None:
    every = brute(step)
    least_bytes = min(o.peak_bytes for o in every)
    assert minimum_peak_bytes(step) <= least_bytes * (1 + 2e-3)
    if budget_bytes < least_bytes:
        with pytest.raises(InfeasibleBudget) as raised:
            choose_options(step, budget_bytes)
        assert raised.value.min_feasible_bytes == least_bytes
        return
    choice = choose_options(step, budget_bytes)
    check(step, choice, budget_bytes)
    best_s = min(o.time_s for o in every if o.peak_bytes <= budget_bytes)
    # Within the solver's gap, and the gain below which nothing is offloaded.
    assert choice.outcome.time_s == pytest.approx(best_s, rel=4e-3)
    assert choice.bound_s <= best_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@hypothesis.given(offloaded_steps())
def test_without_a_budget_the_peak_is_near_the_smallest(step: BlockStep) -> None:
    least_bytes = min(o.peak_bytes for o in brute(step))
    choice = choose_options(step, None)
    check(step, choice, int(1.012 * least_bytes))


def pyramid(count: int, options: tuple[BlockOption, ...], outside_bytes: int = 0) -> BlockStep:
    """Return a step of equal calls, with the largest non-block memory where the forward ends."""
    events = [StepEvent("forward", 0, call) for call in range(count)]
    events.append(StepEvent("outside", outside_bytes))
    events += [StepEvent("backward", 0, call) for call in reversed(range(count))]
    return BlockStep((options,) * count, tuple(events))


def test_the_last_call_of_the_forward_offloads_nothing() -> None:
    step = pyramid(4, (BlockOption(3.0, 10, 10, 12, 1.0),))
    assert host_stays(step) == {0: CallHostStay(1, 1), 1: CallHostStay(2, 2), 2: CallHostStay(3, 3)}
    assert host_stays(pyramid(1, (BlockOption(3.0, 10, 10, 12),))) == {}


def test_a_call_without_a_backward_offloads_nothing() -> None:
    options = (BlockOption(3.0, 10, 10, 12),)
    kinds = (("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 0))
    events = tuple(StepEvent(kind, 0, call) for kind, call in kinds)
    assert set(host_stays(BlockStep((options,) * 3, events))) == {0}


def test_calls_in_another_order_in_the_backward() -> None:
    options = (BlockOption(3.0, 10, 10, 12),)
    kinds = [("forward", call) for call in range(3)]
    kinds += [("backward", call) for call in (1, 2, 0)]
    events = tuple(StepEvent(kind, 0, call) for kind, call in kinds)  # type: ignore[arg-type]
    assert host_stays(BlockStep((options,) * 3, events)) == {0: CallHostStay(1, 2)}


def test_memory_and_waiting_of_a_step() -> None:
    """Four calls of 1 s + 2 s that save 10 bytes; two offload 8 over a link of 4 bytes a second."""
    step = pyramid(4, (BlockOption(3.0, 10, 10, 12, 1.0),), outside_bytes=5)
    offloads = (CallVariant(0, (0,), 8),)
    plain = (CallVariant(0),)
    offloaded = replace(step, host=HostCopies((offloads, offloads, plain, plain), Link(4.0, 4.0)))
    outcome = offloaded.outcome((*offloads, *offloads, *plain, *plain))
    # Each copy there takes 2 s, of which 1 s is hidden; each copy back is hidden by 2 s.
    assert (outcome.waiting_s, outcome.copies_s, outcome.time_s) == (2.0, 8.0, 14.0)
    # During the forward of the last call 2 + 2 + 10 bytes are held, and its own 10; in its backward
    # 12, later 2 + 10 + 12 while the second call's come back.
    assert outcome.peak_bytes == 5 + 2 + 2 + 10 + 10
    assert outcome.host_bytes == 16


def test_copies_that_save_no_time_are_left_out() -> None:
    """The budget asks for one call's bytes; all copies would be hidden."""
    step = pyramid(6, (BlockOption(3.0, 10, 10, 12, 1.0), BlockOption(4.0, 1, 10, 12, 1.0)))
    stays = host_stays(step)
    variants = tuple(
        (CallVariant(0), CallVariant(1), *((CallVariant(0, (0,), 10),) if c in stays else ()))
        for c in range(6)
    )
    step = replace(step, host=HostCopies(variants, Link(1e6, 1e6)))
    whole = step.peak_bytes((0,) * 6)
    choice = choose_options(step, whole - 10)
    assert choice.outcome.time_s == pytest.approx(18.0)
    assert choice.outcome.host_bytes == 10
    assert choose_options(step, whole).outcome.host_bytes == 0


def test_dominated_variants_are_left_out() -> None:
    options = (
        BlockOption(3.0, 10, 10, 12),
        BlockOption(4.0, 10, 10, 12),
        BlockOption(4.0, 2, 9, 9),
    )
    variants = [CallVariant(0), CallVariant(0, (0,), 5), CallVariant(1, (0,), 5), CallVariant(2)]
    assert set(useful_variants(options, variants)) == {variants[0], variants[1], variants[3]}
