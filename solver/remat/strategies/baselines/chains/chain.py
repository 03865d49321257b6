"""The training step as a heterogeneous chain, for Revolve and Rotor.

A *cut point* is a place of the forward order that one value crosses, the *state*, not counting
values that are retained anyway: values that are negligible next to the state (masks, statistics),
and values that operations far apart read repeatedly (position biases, an encoder's output). The
operations between two cut points are a *stage*. Stage s reads state s - 1 and produces state s; its
*tape* consists of its outputs that its backward pass reads.

Backward operations belong to the latest stage whose tape they, or any after them, read: so the
backward pass is one stage after the other, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.errors import RematError
from remat.graph import Graph
from remat.schedule import Schedule
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    forward_count,
    segmented_count,
)

MAX_STAGES = 100
"""Longer chains are shortened by merging the cheapest neighbours: Rotor takes cubic time."""

_NEGLIGIBLE_SHARE = 1 / 16
"""Share of the state's size up to which another value that crosses the cut is always retained."""

_SHARED_SPAN = 0.25
"""Share of the forward pass that lies between the readers of a shared value."""

_MAX_STAGE_SHARE = 2 / 3
"""Share of the forward time in one stage above which a graph is no chain."""


def cut_points(graph: Graph) -> dict[int, int]:
    """Return the operations of the forward pass after which the order may be cut, with the
    states."""
    count = segmented_count(graph)
    last_read = [max((u for u in users if u < count), default=-1) for users in graph.consumers]
    shared = {
        v
        for v, users in enumerate(graph.consumers)
        if sum(u < count for u in users) >= 3
        and last_read[v] - graph.producer[v] > _SHARED_SPAN * count
    }
    cuts: dict[int, int] = {}
    crossing: set[int] = set()
    for op in range(count - 1):
        crossing.update(v for v in graph.operations[op].outputs if last_read[v] > op)
        crossing -= {v for v in graph.operations[op].inputs if last_read[v] <= op}
        crossing_sizes = sorted((graph.values[v].size_bytes, v) for v in crossing - shared)
        if not crossing_sizes:
            continue
        size, state = crossing_sizes.pop()
        if not crossing_sizes or crossing_sizes[-1][0] <= _NEGLIGIBLE_SHARE * size:
            cuts[op] = state
    return cuts


@dataclass(frozen=True)
class Stage:
    """One link of a chain: its operations, the state that it produces (None for the last stage),
    and its tape."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    state: int | None
    tape: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """The stages of a graph. `always_retained` are values that cross cut points in addition to the
    state."""

    graph: Graph
    stages: tuple[Stage, ...]
    always_retained: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, *, strategy: str) -> Chain:
        """Return the chain of a graph. Raises `RematError`, for this strategy, if the graph is no
        chain."""
        count = forward_count(graph)
        if count is None:
            raise RematError(
                f"{strategy} needs to know where the backward pass begins, and no operation is "
                "marked `backward`: mark them, or use ChenSqrt"
            )
        cuts = _merge_stages(graph, cut_points(graph), count)
        ends = [*cuts, count - 1]
        starts = [0, *(end + 1 for end in cuts)]
        forward = [tuple(range(a, b + 1)) for a, b in zip(starts, ends, strict=True)]
        times_s = [sum(graph.operations[op].cost_s for op in ops) for ops in forward]
        if len(forward) < 3 or max(times_s) > max(_MAX_STAGE_SHARE * sum(times_s), 0.0) > 0.0:
            raise RematError(
                f"{strategy} needs a chain, and the forward pass of {count} operations has "
                f"{len(forward) - 1} places that a single value crosses, the longest stretch "
                f"between two of them {max(map(len, forward))} operations: use EveryK, or Auto"
            )
        return cls._of(graph, count, forward, list(cuts.values()))

    @classmethod
    def _of(
        cls, graph: Graph, count: int, forward: list[tuple[int, ...]], states: list[int]
    ) -> Chain:
        stage_of = {op: number for number, ops in enumerate(forward) for op in ops}
        crossing = {
            v
            for op in range(count)
            for v in graph.operations[op].inputs
            if stage_of[graph.producer[v]] != stage_of[op]
        }
        always_retained = frozenset(crossing - set(states))
        is_tape = [
            producer < count and v not in always_retained
            for v, producer in enumerate(graph.producer)
        ]
        backward: list[list[int]] = [[] for _ in forward]
        number = 0
        for op in reversed(range(count, len(graph))):
            for v in graph.operations[op].inputs:
                if is_tape[v]:
                    number = max(number, stage_of[graph.producer[v]])
            backward[number].append(op)
        read = {v for op in range(count, len(graph)) for v in graph.operations[op].inputs}
        stages = tuple(
            Stage(
                forward=ops,
                backward=tuple(reversed(backward[number])),
                state=states[number] if number < len(states) else None,
                tape=tuple(
                    v
                    for op in ops
                    for v in graph.operations[op].outputs
                    if v in read and v not in always_retained
                ),
            )
            for number, ops in enumerate(forward)
        )
        return cls(graph, stages, always_retained)


class ChainScheduleWriter:
    """Writes a schedule stage by stage: the operations of Revolve and Rotor."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._builder = ScheduleBuilder(chain.graph)
        self._next_stage = 0

    def advance(self, number: int) -> None:
        """Run stage `number` from the state before it, and retain only the state that it
        produces."""
        stage = self.chain.stages[number]
        self._run_stage(number, [] if stage.state is None else [stage.state])

    def run_for_tape(self, number: int, *, retains_state: bool) -> None:
        """Run a stage and retain its tape for its backward pass, and its state as well with
        `retains_state`."""
        stage = self.chain.stages[number]
        values = list(stage.tape)
        if retains_state and stage.state is not None:
            values.append(stage.state)
        self._run_stage(number, values)

    def drop(self, number: int) -> None:
        """Stop retaining state `number`."""
        state = self.chain.stages[number].state
        if state is not None:
            self._builder.drop([state])

    def backward(self, number: int) -> None:
        """Run the backward pass of a stage whose tape is retained, then drop the tape."""
        graph = self.chain.graph
        stage = self.chain.stages[number]
        for op in stage.backward:
            self._builder.recompute(graph.operations[op].inputs)
            self._builder.run(op)
        self._builder.drop(v for op in stage.forward for v in graph.operations[op].outputs)

    def schedule(self) -> Schedule:
        """Return the sequence as a schedule."""
        return self._builder.schedule()

    def _run_stage(self, number: int, values: Sequence[int]) -> None:
        stage = self.chain.stages[number]
        if number < self._next_stage:
            self._builder.recompute(values)
            return
        self._next_stage = number + 1
        graph = self.chain.graph
        for op in stage.forward:
            self._builder.run(op)
        outputs = (v for op in stage.forward for v in graph.operations[op].outputs)
        remaining = {*values, *self.chain.always_retained}
        self._builder.drop(v for v in outputs if v not in remaining)


def _merge_stages(graph: Graph, cuts: dict[int, int], count: int) -> dict[int, int]:
    """Return at most `MAX_STAGES` - 1 of the cut points, one for each state (the latest)."""
    latest = {state: op for op, state in cuts.items()}
    ends = sorted(latest.values())
    elapsed_s = [0.0]
    for operation in graph.operations[:count]:
        elapsed_s.append(elapsed_s[-1] + operation.cost_s)
    while len(ends) >= MAX_STAGES:
        edges = [-1, *ends, count - 1]
        joined_s = [elapsed_s[edges[i + 2] + 1] - elapsed_s[edges[i] + 1] for i in range(len(ends))]
        del ends[joined_s.index(min(joined_s))]
    return {op: cuts[op] for op in ends}
