"""Identical blocks are detected, and programs in which they share their decisions give schedules
that fit."""

from __future__ import annotations

import threading
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from tests.helpers.graphs import chain, small_graphs
from tests.helpers.laws import LAWS, part_of_peak

from remat.graph import Graph, Operation, Value
from remat.milp import slots
from remat.milp.identical_blocks import (
    IdenticalBlocks,
    SharedDecisions,
    find_identical_blocks,
    merge_neighbouring_blocks,
)
from remat.milp.model import MilpModel
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.solve import solve
from remat.strategies import Auto, PerBlock, Task
from remat.strategies.search import block_programs
from remat.strategies.search.runner import MilpRunner

FORWARD, BACKWARD = 3, 4
"""The numbers of operations of a block of `stack`."""


def stack(layers: int, odd: int | None = None) -> Graph:
    """Return residual blocks with weight gradients; the block `odd` costs more."""
    operations: list[Operation] = []
    values: list[Value] = []
    results: list[int] = []

    def add(name: str, inputs: list[int], size: int, cost: float, backward: bool = False) -> int:
        values.append(Value(name, size))
        module = f"layer.{name.partition('.')[2]}" if "." in name else ""
        reads = tuple(sorted(set(inputs)))
        outputs = (len(values) - 1,)
        operations.append(Operation(name, reads, outputs, cost, 8, backward, True, module))
        return outputs[0]

    x = add("embed", [], 64, 1)
    saved: list[tuple[int, int, int]] = []
    for i in range(layers):
        product = add(f"mm.{i}", [x], 128, 20 + (i == odd))
        masked = add(f"drop.{i}", [product], 128, 2)
        saved.append((x, product, masked))
        x = add(f"add.{i}", [x, masked], 64, 3)
    values.append(Value("tangent", 1))
    start = Operation("start", (x,), (len(values) - 1,), 0, 0, True, recomputable=False)
    operations.append(start)
    gradient = len(values) - 1
    for i in reversed(range(layers)):
        before, product, masked = saved[i]
        through = add(f"d_drop.{i}", [gradient, masked], 128, 2, True)
        rest = add(f"d_act.{i}", [through, product], 128, 2, True)
        results.append(add(f"d_w.{i}", [rest, before], 16, 20, True))
        gradient = add(f"d_x.{i}", [rest, gradient], 64, 20, True)
    return Graph(tuple(operations), tuple(values), frozenset(results), 32, operations.index(start))


def blocks(layers: int = 20) -> tuple[Graph, IdenticalBlocks]:
    graph = stack(layers)
    identical = find_identical_blocks(graph, 8)
    assert identical is not None
    return graph, identical


def shared_decisions_of(
    graph: Graph, identical: IdenticalBlocks, group: tuple[int, ...]
) -> SharedDecisions:
    offered = slots.build_periodic_slots(
        graph, identical.block_of, max_distance=8, stride=4, min_idle=2, group_span=14
    )
    return SharedDecisions.of(graph, identical, offered, group)


def programs(graph: Graph, **options: float) -> MilpRunner:
    return MilpRunner(graph, Auto(time_limit=20.0, **options), Clock.of(20.0))


def test_blocks_and_their_backward_are_detected() -> None:
    graph, identical = blocks()
    assert identical.forward_length == FORWARD
    assert identical.count >= 18, "all blocks but those at an end"
    layers = [
        int(graph.operations[op].module[6:]) - block
        for op, block in enumerate(identical.block_of)
        if block >= 0
    ]
    assert max(layers) - min(layers) <= 1, "the backward of a layer is in its block, or the next"
    for op, (block, place) in enumerate(
        zip(identical.block_of, identical.position_of, strict=True)
    ):
        assert (block < 0) == (place < 0)
        kind = graph.operations[op].name.partition(".")[0]
        same = {o for o in range(len(graph)) if identical.position_of[o] == place and place >= 0}
        assert all(graph.operations[o].name.partition(".")[0] == kind for o in same)
        assert len(same) in (0, identical.count)


def test_a_different_block_ends_the_sequence_of_identical_ones() -> None:
    identical = find_identical_blocks(stack(24, odd=10), 8)
    assert identical is not None
    assert 11 <= identical.count <= 13
    assert find_identical_blocks(stack(16, odd=8), 10) is None


def test_graphs_without_repeats_have_none() -> None:
    assert find_identical_blocks(chain(20), 8) is None, "no boundary"
    graph = stack(20)
    uneven_layers = tuple(replace(o, cost_s=o.cost_s + i) for i, o in enumerate(graph.operations))
    assert find_identical_blocks(replace(graph, operations=uneven_layers), 8) is None
    assert find_identical_blocks(graph, 21) is None
    assert block_programs.find_repeated_blocks(graph) is None, "too small to be worth it"


@settings(LAWS, max_examples=60)
@hypothesis.given(small_graphs())
def test_detection_never_fails(graph: Graph) -> None:
    identical = find_identical_blocks(graph, 2)
    if identical is not None:
        assert len(identical.block_of) == len(identical.position_of) == len(graph)
        assert identical.count >= 2


def test_merging_blocks_keeps_their_operations() -> None:
    _, identical = blocks()
    pairs = merge_neighbouring_blocks(identical, 2)
    assert pairs.count == identical.count // 2
    assert pairs.forward_length == 2 * identical.forward_length
    inside = [(b, p) for b, p in zip(pairs.block_of, pairs.position_of, strict=True) if b >= 0]
    assert len(inside) == len(set(inside)) == pairs.count * 2 * (FORWARD + BACKWARD)
    assert merge_neighbouring_blocks(identical, 1) == identical


def test_all_blocks_have_the_same_slots() -> None:
    graph, identical = blocks()
    shared = shared_decisions_of(graph, identical, (0, *(1 for _ in range(identical.count - 2)), 2))
    seen: dict[int, list[object]] = {}
    for slot, stage in enumerate(shared.stages):
        seen.setdefault(identical.block_of[stage], []).append(shared.run_key(slot))
    middle = range(5, identical.count - 5)
    assert all(seen[block] == seen[5] for block in middle)
    assert any(shared.slots.is_optional)
    assert not all(shared.has_rows)


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_groups_of_one_block_share_no_decisions(share: float) -> None:
    graph, identical = blocks(12)
    shared = shared_decisions_of(graph, identical, tuple(range(identical.count)))
    free = MilpModel(graph, shared.slots, part_of_peak(graph, share))
    bound = MilpModel(graph, shared.slots, part_of_peak(graph, share), shared)
    assert all(shared.has_rows)
    assert len(free.program.rows) == len(bound.program.rows)
    assert len(free.program.columns) == len(bound.program.columns)


@pytest.mark.slow_cases("0.35-3", "0.7-3")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.7])
def test_schedules_of_a_tied_program_fit(groups: int, share: float) -> None:
    graph, identical = blocks(14)
    inner = identical.count - 2
    group = (0, *(1 + i * groups // inner for i in range(inner)), groups + 1)
    shared = shared_decisions_of(graph, identical, group)
    budget_bytes = part_of_peak(graph, share)
    schedule = programs(graph).minimize_shared_cost(
        shared, budget_bytes, None, 8.0, lambda _: False, 1e-3
    )
    assert schedule is not None
    assert simulate(graph, schedule).peak_bytes <= budget_bytes
    used = set(shared.slots.locate(schedule) or ())
    choice: dict[object, set[bool]] = {}
    for slot, optional in enumerate(shared.slots.is_optional):
        if optional:
            choice.setdefault(shared.run_key(slot), set()).add(slot in used)
    assert all(len(decided) == 1 for decided in choice.values()), (
        "a class runs together or not at all"
    )


def test_nothing_is_recomputed_where_everything_fits() -> None:
    graph, identical = blocks()
    shared = shared_decisions_of(graph, identical, (0,) * identical.count)
    schedule = programs(graph).minimize_shared_cost(
        shared, part_of_peak(graph, 1.0), None, 2.0, lambda _: False, 0.0
    )
    assert schedule == Schedule.keep_all(graph)


@pytest.mark.slow
def test_a_tied_program_is_no_worse_than_checkpointing_each_block() -> None:
    graph, identical = blocks(24)
    per_block = PerBlock().run(Task(graph)).schedule
    peak_bytes, time_s = peak_and_time(graph, per_block)
    schedule = block_programs.identical_blocks_schedule(
        programs(graph), identical, peak_bytes, Clock.of(2.0), lambda _: False
    )
    assert schedule is not None
    assert peak_and_time(graph, schedule)[0] <= peak_bytes
    assert peak_and_time(graph, schedule)[1] < time_s


def test_a_tied_program_obeys_cancellation_and_its_time_limit() -> None:
    graph, identical = blocks(24)
    budget_bytes = part_of_peak(graph, 0.5)
    cancel = threading.Event()
    cancel.set()
    for clock in (Clock.of(60.0, cancel), Clock.of(0.0)):
        run = programs(graph)
        block_programs.identical_blocks_schedule(
            run, identical, budget_bytes, clock, lambda _: False
        )
        assert run.stats["rows"] == 0, "no program was run"


@pytest.mark.parametrize("share", [pytest.param(0.3, marks=pytest.mark.slow), 0.5])
def test_auto_is_no_worse_with_identical_blocks(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = blocks(20)
    auto = Auto(time_limit=5.0, gap=0.002, complete_slots=100)
    budget_bytes = part_of_peak(graph, share)
    without = solve(graph, budget_bytes, auto)
    monkeypatch.setattr(block_programs, "_MIN_OPERATIONS", 10)
    with_blocks = solve(graph, budget_bytes, auto)
    assert with_blocks.peak_bytes <= budget_bytes
    # Both may end at the time limit, on a slow machine.
    assert with_blocks.time_s <= without.time_s * 1.05
