"""Slots: the places in the executed sequence where an operation may run.

Every operation has one mandatory slot, its first run; all others are optional recomputation. The
slot set is the one knob between exactness and speed:

* `complete`: every operation before every later one, Checkmate's space for the fixed order
  (Jain et al., MLSys 2020, section 4). For small graphs.
* `near`: before an operation that reads a value which lay idle for long, that value's producer
  and the ancestors from which it can be made again. This is what a backward pass looks like, but
  also a skip connection, so no flag says which operations are backward.

A *group* is a set of slots of one operation of which at most one runs. Groups of one slot restrict
nothing; larger ones make the relaxation tight (see `remat.milp.cuts`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.graph import Graph
from remat.schedule import Schedule

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Slots:
    """For each slot its operation and whether it is optional, in sequence order; and the groups.

    `complete` says that the set holds every schedule of the graph's order.
    """

    operations: tuple[int, ...]
    optional: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]
    complete: bool

    def __len__(self) -> int:
        return len(self.operations)

    @cached_property
    def optional_count(self) -> int:
        """The number of binaries of the model."""
        return sum(self.optional)

    def locate(self, schedule: Schedule) -> tuple[int, ...] | None:
        """The optional slots that `schedule` uses, or None if it needs one that is not offered."""
        used: list[int] = []
        slot = 0
        seen: set[int] = set()
        for op in schedule.runs:
            again = op in seen
            seen.add(op)
            while slot < len(self) and not (
                self.operations[slot] == op and self.optional[slot] == again
            ):
                if not self.optional[slot]:
                    return None
                slot += 1
            if slot == len(self):
                return None
            if again:
                used.append(slot)
            slot += 1
        chosen = set(used)
        if any(len(chosen.intersection(group)) > 1 for group in self.groups):
            return None
        return tuple(used)

    def only(self, used: Iterable[int]) -> Slots:
        """Without the optional slots that are not among `used`."""
        chosen = set(used)
        kept = [s for s, optional in enumerate(self.optional) if not optional or s in chosen]
        number = {slot: i for i, slot in enumerate(kept)}
        groups = (tuple(number[s] for s in group if s in number) for group in self.groups)
        return Slots(
            operations=tuple(self.operations[slot] for slot in kept),
            optional=tuple(self.optional[slot] for slot in kept),
            groups=tuple(group for group in groups if group),
            complete=False,
        )

    def schedule(self, used: Iterable[int]) -> Schedule:
        """The schedule that runs the mandatory slots and, of the optional ones, `used`."""
        chosen = set(used)
        return Schedule.of(
            op
            for slot, op in enumerate(self.operations)
            if not self.optional[slot] or slot in chosen
        )


def complete_count(graph: Graph) -> int:
    """An upper bound on the optional slots of `complete`, without building them."""
    count = len(graph)
    return count * (count - 1) // 2


def complete(graph: Graph, affordable_s: float = math.inf) -> Slots:
    """Every recomputable operation before every later one.

    Operations that cost more than `affordable_s` may be left out where a schedule with no more
    extra time is known: none that runs them again is better.

    Even right after its own first run: what ran between the two may have to run before the first
    as well, and each operation has one slot a stage.
    """
    again = [op for op in range(len(graph)) if _may_run_again(graph, op, affordable_s)]
    offered = [again[: bisect_left(again, stage)] for stage in range(len(graph))]
    return _build(graph, offered, region=0, is_complete=True)


def near(
    graph: Graph,
    *,
    back: int,
    every: int,
    idle: int,
    region: int,
    known: Sequence[Schedule] = (),
    stages: range | None = None,
    affordable_s: float = math.inf,
) -> Slots:
    """Slots before operations that read a value idle for more than `idle` operations.

    Offered are the value's producer and its ancestors up to `back` operations before it, at every
    `every`-th such operation, for it and those up to the next. Slots of one operation less than
    `region` operations apart form a group. `known` are schedules (of the graph's order): the
    slots can express the first, whatever the other options say, and offer what the others run.
    `stages` are the operations before which anything is offered beyond that; all by default.
    Nothing is offered that costs more than `affordable_s`, but for the first of the schedules.
    """
    offered: list[set[int]] = [set() for _ in graph.operations]
    for start, wanted in _demands(graph, every, idle):
        if stages is None or start in stages:
            found = _ancestors(graph, wanted, back, before=start)
            offered[start].update(op for op in found if _may_run_again(graph, op, affordable_s))
    for rank, schedule in enumerate(known):
        for stage, op in _recomputations(schedule):
            if rank == 0 or _may_run_again(graph, op, affordable_s):
                offered[stage].add(op)
    return _build(graph, offered, region=region, keep=known[0] if known else None)


def recombined(graph: Graph, known: Sequence[Schedule], *, region: int) -> Slots:
    """What any of these schedules runs again, where it does; the first can be expressed."""
    return near(graph, back=0, every=1, idle=0, region=region, known=known, stages=range(0))


def periodic(
    graph: Graph, block: Sequence[int], *, back: int, every: int, idle: int, region: int
) -> Slots:
    """As `near` in the backward pass, but counted anew in each block (`block`, for each operation),
    so that identical blocks have the same slots."""
    offered: list[set[int]] = [set() for _ in graph.operations]
    for start, wanted in _demands(graph, every, idle, block):
        if graph.boundary is not None and start < graph.boundary:
            continue
        found = _ancestors(graph, wanted, back, before=start)
        offered[start].update(op for op in found if graph.operations[op].recomputable)
    return _build(graph, offered, region=region)


def _may_run_again(graph: Graph, op: int, affordable_s: float) -> bool:
    operation = graph.operations[op]
    return operation.recomputable and operation.cost_s <= affordable_s * (1 + _ROUNDING)


def _demands(
    graph: Graph, every: int, idle: int, block: Sequence[int] | None = None
) -> Iterator[tuple[int, set[int]]]:
    """(stage, values read at it and shortly after that were idle for long before). With `block`, of
    each operation, no further than its block."""
    last_event = list(graph.producer)
    start = -1
    count = 0
    wanted: set[int] = set()
    for op, operation in enumerate(graph.operations):
        idle_inputs = [v for v in operation.inputs if op - last_event[v] > idle]
        for v in operation.inputs:
            last_event[v] = op
        if not idle_inputs:
            continue
        is_next = block is not None and start >= 0 and block[op] != block[start]
        if is_next or count == every or (start >= 0 and op - start > 4 * every):
            yield start, wanted
            start, count, wanted = -1, 0, set()
        if start < 0:
            start = op
        count += 1
        wanted.update(v for v in idle_inputs if graph.producer[v] < start)
    if start >= 0:
        yield start, wanted


def _ancestors(graph: Graph, values: set[int], back: int, *, before: int) -> set[int]:
    """Recomputable operations from which `values` follow, `back` before their producers at most."""
    reach: dict[int, int] = {}
    heap = sorted((graph.producer[v] for v in values), reverse=True)
    for op in heap:
        reach[op] = op - back
    found: set[int] = set()
    stack = heap
    while stack:
        op = stack.pop()
        if not graph.operations[op].recomputable:
            continue
        if op < before:
            found.add(op)
        for v in graph.operations[op].inputs:
            parent = graph.producer[v]
            limit = reach[op]
            if v not in graph.results and parent >= limit and limit < reach.get(parent, parent + 1):
                reach[parent] = limit
                stack.append(parent)
    return found


def _recomputations(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """(stage, operation) for each run that is a recomputation; the stage is the next first run."""
    seen: set[int] = set()
    waiting: list[int] = []
    for op in schedule.runs:
        if op in seen:
            waiting.append(op)
            continue
        seen.add(op)
        for again in waiting:
            yield op, again
        waiting.clear()


def _build(
    graph: Graph,
    offered: Iterable[Iterable[int]],
    *,
    region: int,
    keep: Schedule | None = None,
    is_complete: bool = False,
) -> Slots:
    sequence: list[tuple[int, int, bool]] = []
    for stage, ops in enumerate(offered):
        sequence += [(op, stage, True) for op in sorted(ops)]
        sequence.append((stage, stage, False))
    sequence = _useful(graph, sequence)
    slots = Slots(
        operations=tuple(op for op, _, _ in sequence),
        optional=tuple(optional for _, _, optional in sequence),
        groups=(),
        complete=is_complete,
    )
    kept = set(slots.locate(keep) or ()) if keep is not None else set[int]()
    groups: list[list[int]] = []
    current: dict[int, list[int]] = {}
    for slot, (op, stage, optional) in enumerate(sequence):
        if not optional:
            continue
        group = current.get(op)
        split = (
            group is None
            or stage - sequence[group[-1]][1] >= region
            or (slot in kept and any(s in kept for s in group))
        )
        if split:
            group = current[op] = []
            groups.append(group)
        assert group is not None
        group.append(slot)
    return Slots(slots.operations, slots.optional, tuple(map(tuple, groups)), is_complete)


def _useful(graph: Graph, sequence: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Without the optional slots whose outputs no later slot reads."""
    read_later = [False] * len(graph.values)
    kept: list[tuple[int, int, bool]] = []
    for entry in reversed(sequence):
        op, _, optional = entry
        operation = graph.operations[op]
        if optional and not any(
            read_later[v] and v not in graph.results and graph.values[v].size_bytes > 0
            for v in operation.outputs
        ):
            continue
        kept.append(entry)
        for v in operation.inputs:
            read_later[v] = True
    kept.reverse()
    return kept
