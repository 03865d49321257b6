"""Identical blocks: a run of equal stretches of the forward pass, and their backward passes.

Operations are compared by what the solver sees of them (cost, sizes, workspace, flags) and by
where their inputs come from: so many operations before, or so far into the block that the backward
is at, or the very same operation for all. The period is guessed from how far apart equal operations
lie, and then checked by comparing the sequence with itself, shifted. Linear in the graph's size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.graph import Graph

_GUESSES = 12
"""Periods that are tried."""

_MOST = 0.98
"""Of the longest run's operations: a shorter period that covers as many is the better one."""

_REACH = 2
"""Periods that an input may lie back and be named by its distance."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """For each operation the block it belongs to (from 0, as in the forward pass) and its place in
    it; -1 and -1 outside. Places of the backward come after the forward's."""

    count: int
    length: int
    """Operations of a block's forward pass."""
    block: tuple[int, ...]
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    first: int
    period: int
    count: int

    def locate(self, op: int) -> tuple[int, int] | None:
        """(block, offset) of an operation of the run."""
        block, offset = divmod(op - self.first, self.period)
        return (block, offset) if 0 <= block < self.count else None


def find(graph: Graph, least: int) -> Repeats | None:
    """The longest run of identical blocks with their backward; None with fewer than `least`."""
    start = graph.boundary
    if start is None:
        return None
    looks = [_look(graph, op) for op in range(len(graph))]
    period = _period(looks[:start], least)
    back = _period(looks[start:], least)
    if period is None or back is None:
        return None

    def near(op: int, reach: int) -> list[Hashable]:
        sources = [(v, graph.producer[v]) for v in graph.operations[op].inputs]
        return [("before", op - p, _output(graph, v)) if op - p <= reach else v for v, p in sources]

    forward = _longest(
        [(looks[op], tuple(near(op, _REACH * period))) for op in range(start)], period, 0
    )

    def far(op: int) -> Hashable:
        found: list[Hashable] = []
        for v in graph.operations[op].inputs:
            at = forward.locate(graph.producer[v])
            if at is None:
                distance = op - graph.producer[v]
                found.append((distance, _output(graph, v)) if distance <= _REACH * back else v)
            else:
                found.append((at[0] + (op - start) // back, at[1], _output(graph, v)))
        return (looks[op], tuple(found))

    backward = _longest([far(op) for op in range(start, len(graph))], back, start)
    return _paired(graph, forward, backward, least)


def _paired(graph: Graph, forward: _Run, backward: _Run, least: int) -> Repeats | None:
    """The blocks that are in both runs. The block of a backward one is the block that it mostly
    reads."""
    sums: Counter[int] = Counter()
    for op in range(backward.first, backward.first + backward.period * backward.count):
        for v in graph.operations[op].inputs:
            at = forward.locate(graph.producer[v])
            if at is not None:
                sums[at[0] + (op - backward.first) // backward.period] += 1
    if not sums:
        return None
    total = sums.most_common(1)[0][0]
    low = max(0, total - backward.count + 1)
    high = min(forward.count - 1, total)
    if high - low + 1 < least:
        return None
    block, place = [-1] * len(graph), [-1] * len(graph)
    for op in range(len(graph)):
        if (at := forward.locate(op)) is not None:
            b, o = at
        elif (at := backward.locate(op)) is not None:
            b, o = total - at[0], at[1] + forward.period
        else:
            continue
        if low <= b <= high:
            block[op], place[op] = b - low, o
    return Repeats(high - low + 1, forward.period, tuple(block), tuple(place))


def _look(graph: Graph, op: int) -> Hashable:
    o = graph.operations[op]
    outputs = tuple((graph.values[v].size_bytes, v in graph.results) for v in o.outputs)
    over = tuple(o.inputs.index(v) for v in o.overwrites)
    held = (o.workspace_bytes, outputs, len(o.inputs), over)
    return (o.cost_s, held, o.recomputable, o.sequenced)


def _output(graph: Graph, value: int) -> int:
    return graph.operations[graph.producer[value]].outputs.index(value)


def _period(looks: Sequence[Hashable], least: int) -> int | None:
    """The smallest period of the run that covers the most; None if no run is long enough."""
    last: dict[Hashable, int] = {}
    gaps: Counter[int] = Counter()
    for position, look in enumerate(looks):
        if look in last:
            gaps[position - last[look]] += 1
        last[look] = position
    likely = sorted(gaps, key=lambda gap: -gaps[gap] * gap)[:_GUESSES]
    numbers = _numbered(looks)
    covered = {gap: _stretch(numbers, gap)[1] + gap for gap in likely if gap * least <= len(looks)}
    covered = {gap: length for gap, length in covered.items() if length >= least * gap}
    longest = max(covered.values(), default=0)
    return min((gap for gap, length in covered.items() if length >= _MOST * longest), default=None)


def _longest(signs: Sequence[Hashable], period: int, offset: int) -> _Run:
    start, length = _stretch(_numbered(signs), period)
    return _Run(offset + start, period, length // period + 1 if length else 0)


def _numbered(items: Sequence[Hashable]) -> NDArray[np.int64]:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(item, len(known)) for item in items], dtype=np.int64)


def _stretch(numbers: NDArray[np.int64], lag: int) -> tuple[int, int]:
    """Start and length of the longest stretch that equals what comes `lag` later."""
    same = np.concatenate(([False], numbers[:-lag] == numbers[lag:], [False]))
    edges = np.flatnonzero(same[1:] != same[:-1])
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])


def merged(repeats: Repeats, width: int) -> Repeats:
    """`width` neighbouring blocks as one; those that are left over at the start are in none."""
    skip = repeats.count % width
    places = max(repeats.place) + 1
    pairs = [
        ((b - skip) // width, ((b - skip) % width) * places + o) if b >= skip else (-1, -1)
        for b, o in zip(repeats.block, repeats.place, strict=True)
    ]
    return Repeats(
        repeats.count // width,
        repeats.length * width,
        tuple(b for b, _ in pairs),
        tuple(o for _, o in pairs),
    )
