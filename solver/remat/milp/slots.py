"""Slots: the places in the executed sequence where an operation may run.

Every operation has one mandatory slot, its first run; all others are optional recomputations. The
slot set trades exactness for speed:

* `build_complete_slots`: every operation before every later one, Checkmate's space for the fixed
  order (Jain et al., MLSys 2020, section 4). For small graphs.
* `build_idle_read_slots`: before an operation that reads a value which was idle for long, that
  value's producer and the ancestors from which it can be recomputed. This is what a backward pass
  looks like, but also a skip connection, so no flag says which operations are backward.

A *group* is a set of slots of one operation of which at most one runs. Groups of one slot restrict
nothing; larger ones make the relaxation tight (see `remat.milp.model`). A *stage* is the place
before an operation's first run: the slots of a stage are for recomputations at that place.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.graph import Graph
from remat.schedule import Schedule

_COST_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Slots:
    """The operation of each slot and whether it is optional, in sequence order, and the groups.

    `is_complete` is true if the slots can express every schedule of the graph's order.
    """

    operations: tuple[int, ...]
    is_optional: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]
    is_complete: bool

    def __len__(self) -> int:
        return len(self.operations)

    @cached_property
    def optional_count(self) -> int:
        """The number of optional slots, which is the number of binaries of the program."""
        return sum(self.is_optional)

    def locate(self, schedule: Schedule) -> tuple[int, ...] | None:
        """Return the optional slots that `schedule` uses; None if the slots cannot express it."""
        used: list[int] = []
        slot = 0
        seen: set[int] = set()
        for op in schedule.runs:
            is_recomputation = op in seen
            seen.add(op)
            while slot < len(self) and not (
                self.operations[slot] == op and self.is_optional[slot] == is_recomputation
            ):
                if not self.is_optional[slot]:
                    return None
                slot += 1
            if slot == len(self):
                return None
            if is_recomputation:
                used.append(slot)
            slot += 1
        used_set = set(used)
        if any(len(used_set.intersection(group)) > 1 for group in self.groups):
            return None
        return tuple(used)

    def only(self, optional_slots: Iterable[int]) -> Slots:
        """Return the mandatory slots and these optional ones, without the other optional slots."""
        selected = set(optional_slots)
        remaining = [
            s for s, optional in enumerate(self.is_optional) if not optional or s in selected
        ]
        new_index = {slot: i for i, slot in enumerate(remaining)}
        groups = (tuple(new_index[s] for s in group if s in new_index) for group in self.groups)
        return Slots(
            operations=tuple(self.operations[slot] for slot in remaining),
            is_optional=tuple(self.is_optional[slot] for slot in remaining),
            groups=tuple(group for group in groups if group),
            is_complete=False,
        )

    def schedule(self, optional_slots: Iterable[int]) -> Schedule:
        """Return the schedule that runs the mandatory slots and these optional ones."""
        selected = set(optional_slots)
        return Schedule.of(
            op
            for slot, op in enumerate(self.operations)
            if not self.is_optional[slot] or slot in selected
        )


def complete_slot_count(graph: Graph) -> int:
    """Return an upper bound on the optional slots of `build_complete_slots`, without building
    them."""
    count = len(graph)
    return count * (count - 1) // 2


def build_complete_slots(graph: Graph, affordable_s: float = math.inf) -> Slots:
    """Return slots for every recomputable operation before every later one.

    Operations that cost more than `affordable_s` are left out. That is safe where a schedule with
    no more extra time is known: none that recomputes such an operation is better.

    An operation has a slot even right after its own first run: operations that ran between the two
    may have to run before the first as well, and each operation has one slot per stage.
    """
    recomputable = [op for op in range(len(graph)) if _may_recompute(graph, op, affordable_s)]
    by_stage = [recomputable[: bisect_left(recomputable, stage)] for stage in range(len(graph))]
    return _build_slots(graph, by_stage, group_span=0, is_complete=True)


def build_idle_read_slots(
    graph: Graph,
    *,
    max_distance: int,
    stride: int,
    min_idle: int,
    group_span: int,
    schedules: Sequence[Schedule] = (),
    stages: range | None = None,
    affordable_s: float = math.inf,
) -> Slots:
    """Return slots before operations that read a value idle for more than `min_idle` operations.

    They are for the value's producer and its ancestors up to `max_distance` operations before it,
    at every `stride`-th such operation, for the values that it and those up to the next one read.
    Slots of one operation less than `group_span` operations apart form a group. `schedules` follow
    the graph's order: the slots can express the first, whatever the other arguments are, and
    include the recomputations of the others. `stages` limits the other slots to those before these
    operations. Operations that cost more than `affordable_s` get no slots, except for the first
    schedule.
    """
    by_stage: list[set[int]] = [set() for _ in graph.operations]
    for stage, values in _idle_reads(graph, stride, min_idle):
        if stages is None or stage in stages:
            ancestors = _recomputable_ancestors(graph, values, max_distance, before=stage)
            by_stage[stage].update(
                op for op in ancestors if _may_recompute(graph, op, affordable_s)
            )
    for rank, schedule in enumerate(schedules):
        for stage, op in _recomputations_by_stage(schedule):
            if rank == 0 or _may_recompute(graph, op, affordable_s):
                by_stage[stage].add(op)
    required = schedules[0] if schedules else None
    return _build_slots(graph, by_stage, group_span=group_span, required=required)


def build_recombination_slots(
    graph: Graph, schedules: Sequence[Schedule], *, group_span: int
) -> Slots:
    """Return the slots that any of these schedules uses; they can express the first."""
    return build_idle_read_slots(
        graph,
        max_distance=0,
        stride=1,
        min_idle=0,
        group_span=group_span,
        schedules=schedules,
        stages=range(0),
    )


def build_periodic_slots(
    graph: Graph,
    block_of: Sequence[int],
    *,
    max_distance: int,
    stride: int,
    min_idle: int,
    group_span: int,
) -> Slots:
    """Return slots like `build_idle_read_slots`, in the backward pass only, where identical blocks
    have identical slots: strides restart in each block (`block_of` has one for each operation)."""
    by_stage: list[set[int]] = [set() for _ in graph.operations]
    for stage, values in _idle_reads(graph, stride, min_idle, block_of):
        if graph.boundary is not None and stage < graph.boundary:
            continue
        ancestors = _recomputable_ancestors(graph, values, max_distance, before=stage)
        by_stage[stage].update(op for op in ancestors if graph.operations[op].recomputable)
    return _build_slots(graph, by_stage, group_span=group_span)


def _may_recompute(graph: Graph, op: int, affordable_s: float) -> bool:
    """True if an operation is recomputable and costs at most `affordable_s`, up to rounding."""
    operation = graph.operations[op]
    return operation.recomputable and operation.cost_s <= affordable_s * (1 + _COST_TOLERANCE)


def _idle_reads(
    graph: Graph, stride: int, min_idle: int, block_of: Sequence[int] | None = None
) -> Iterator[tuple[int, set[int]]]:
    """Yield (stage, values): values that nothing used for more than `min_idle` operations, and that
    the stage reads, or one of the next operations with such inputs. `stride` of them are put
    together, if they are near; with `block_of`, only operations of one block.
    """
    last_event = list(graph.producer)
    stage = -1
    count = 0
    values: set[int] = set()
    for op, operation in enumerate(graph.operations):
        idle_inputs = [v for v in operation.inputs if op - last_event[v] > min_idle]
        for v in (*operation.inputs, *operation.renews):
            last_event[v] = op
        if not idle_inputs:
            continue
        is_next_block = block_of is not None and stage >= 0 and block_of[op] != block_of[stage]
        if is_next_block or count == stride or (stage >= 0 and op - stage > 4 * stride):
            yield stage, values
            stage, count, values = -1, 0, set()
        if stage < 0:
            stage = op
        count += 1
        values.update(v for v in idle_inputs if graph.producer[v] < stage)
    if stage >= 0:
        yield stage, values


def _recomputable_ancestors(
    graph: Graph, values: set[int], max_distance: int, *, before: int
) -> set[int]:
    """Return the recomputable operations before `before` from which the values can be recomputed,
    at most `max_distance` before the values' producers. Results, and inputs that are renewed before
    `before`, count as live."""
    earliest: dict[int, int] = {}
    heap = sorted((graph.producer[v] for v in values), reverse=True)
    for op in heap:
        earliest[op] = op - max_distance
    ancestors: set[int] = set()
    stack = heap
    while stack:
        op = stack.pop()
        if not graph.operations[op].recomputable:
            continue
        if op < before:
            ancestors.add(op)
        for v in graph.operations[op].inputs:
            parent = graph.producer[v]
            if graph.renewal.get(v, before) < before:
                continue  # renewed, and probably live
            limit = earliest[op]
            is_reached = parent >= limit and limit < earliest.get(parent, parent + 1)
            if v not in graph.results and is_reached:
                earliest[parent] = limit
                stack.append(parent)
    return ancestors


def _recomputations_by_stage(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield (stage, operation) for each recomputation; the stage is the next first run."""
    seen: set[int] = set()
    pending: list[int] = []
    for op in schedule.runs:
        if op in seen:
            pending.append(op)
            continue
        seen.add(op)
        for recomputed in pending:
            yield op, recomputed
        pending.clear()


def _build_slots(
    graph: Graph,
    by_stage: Iterable[Iterable[int]],
    *,
    group_span: int,
    required: Schedule | None = None,
    is_complete: bool = False,
) -> Slots:
    """Return the slots of all first runs, and of the recomputations that `by_stage` has for each
    stage, in groups that allow the schedule `required`. Slots whose outputs no later slot reads are
    left out."""
    sequence: list[tuple[int, int, bool]] = []
    for stage, ops in enumerate(by_stage):
        sequence += [(op, stage, True) for op in sorted(ops) if graph.may_recompute(op, stage)]
        sequence.append((stage, stage, False))
    sequence = _without_unread_slots(graph, sequence)
    slots = Slots(
        operations=tuple(op for op, _, _ in sequence),
        is_optional=tuple(optional for _, _, optional in sequence),
        groups=(),
        is_complete=is_complete,
    )
    required_slots = set(slots.locate(required) or ()) if required is not None else set[int]()
    groups: list[list[int]] = []
    current: dict[int, list[int]] = {}
    for slot, (op, stage, optional) in enumerate(sequence):
        if not optional:
            continue
        group = current.get(op)
        starts_group = (
            group is None
            or stage - sequence[group[-1]][1] >= group_span
            or (slot in required_slots and any(s in required_slots for s in group))
        )
        if starts_group:
            group = current[op] = []
            groups.append(group)
        assert group is not None
        group.append(slot)
    return Slots(slots.operations, slots.is_optional, tuple(map(tuple, groups)), is_complete)


def _without_unread_slots(
    graph: Graph, sequence: list[tuple[int, int, bool]]
) -> list[tuple[int, int, bool]]:
    """Return the sequence without the optional slots whose outputs no later slot reads."""
    is_read_later = [False] * len(graph.values)
    useful: list[tuple[int, int, bool]] = []
    for entry in reversed(sequence):
        op, _, optional = entry
        operation = graph.operations[op]
        if optional and not any(
            is_read_later[v] and v not in graph.results and graph.values[v].size_bytes > 0
            for v in operation.outputs
        ):
            continue
        useful.append(entry)
        for v in operation.inputs:
            is_read_later[v] = True
    useful.reverse()
    return useful
