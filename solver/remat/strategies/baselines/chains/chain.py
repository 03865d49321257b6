"""The training step as a heterogeneous chain, for Revolve and Rotor.

A *cut point* is a place of the forward order that one value crosses, the *state*, not counting
what is kept anyhow: values next to nothing beside the state (masks, statistics), and values that
operations far apart read again and again (position biases, an encoder's output). The operations
between two cut points are a *stage*. Stage s reads state s - 1 and makes state s; its *tape* is
what its backward pass reads of what it makes.

Backward operations belong to the latest stage that they, or any after them, read the tape of: so
the backward pass is one stage after the other, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.errors import RematError
from remat.graph import Graph
from remat.schedule import Schedule
from remat.strategies.baselines.schedule_builder import ScheduleBuilder, segmented_count, forward_count

MAX_STAGES = 100
"""Finer chains are coarsened, the cheapest neighbours first: Rotor takes cubic time."""

_NOTHING = 1 / 16
"""Of the state's size: a value that crosses beside it and is that small is kept."""

_FAR = 0.25
"""Of the forward pass: how far apart the readers of a shared value are."""

_ONE_STAGE = 2 / 3
"""Of the forward time: a graph with so much in one stage is no chain."""


def cut_points(graph: Graph) -> dict[int, int]:
    """After which operations of the forward pass the order may be cut, with the states."""
    count = segmented_count(graph)
    last = [max((u for u in users if u < count), default=-1) for users in graph.consumers]
    shared = {
        v
        for v, users in enumerate(graph.consumers)
        if sum(u < count for u in users) >= 3 and last[v] - graph.producer[v] > _FAR * count
    }
    found: dict[int, int] = {}
    crossing: set[int] = set()
    for op in range(count - 1):
        crossing.update(v for v in graph.operations[op].outputs if last[v] > op)
        crossing -= {v for v in graph.operations[op].inputs if last[v] <= op}
        beside = sorted((graph.values[v].size_bytes, v) for v in crossing - shared)
        if not beside:
            continue
        size, state = beside.pop()
        if not beside or beside[-1][0] <= _NOTHING * size:
            found[op] = state
    return found


@dataclass(frozen=True)
class Stage:
    """One link: its operations, the state that it makes (None: the last one), and its tape."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    state: int | None
    tape: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """The stages of a graph; `kept` are values that cross cut points beside the state."""

    graph: Graph
    stages: tuple[Stage, ...]
    kept: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, *, name: str) -> Chain:
        """Raises `RematError`, for the strategy `name`, if the graph is no chain."""
        count = forward_count(graph)
        if count is None:
            raise RematError(
                f"{name} needs to know where the backward pass begins, and no operation is marked "
                "`backward`: mark them, or use ChenSqrt"
            )
        cuts = _coarsened(graph, cut_points(graph), count)
        ends = [*cuts, count - 1]
        starts = [0, *(end + 1 for end in cuts)]
        forward = [tuple(range(a, b + 1)) for a, b in zip(starts, ends, strict=True)]
        times_s = [sum(graph.operations[op].cost_s for op in ops) for ops in forward]
        if len(forward) < 3 or max(times_s) > max(_ONE_STAGE * sum(times_s), 0.0) > 0.0:
            raise RematError(
                f"{name} needs a chain, and the forward pass of {count} operations has "
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
        kept = frozenset(crossing - set(states))
        is_tape = [producer < count and v not in kept for v, producer in enumerate(graph.producer)]
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
                    if v in read and v not in kept
                ),
            )
            for number, ops in enumerate(forward)
        )
        return cls(graph, stages, kept)


class ChainScheduleWriter:
    """Writes a schedule stage by stage; the verbs of Revolve and Rotor."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._builder = ScheduleBuilder(chain.graph)
        self._next = 0

    def advance(self, number: int) -> None:
        """From state `number` - 1, held, to state `number`; nothing else of the stage stays."""
        stage = self.chain.stages[number]
        self._forward(number, [] if stage.state is None else [stage.state])

    def tape(self, number: int, *, with_state: bool) -> None:
        """Run a stage for its backward pass, and hold its state as well if told so."""
        stage = self.chain.stages[number]
        wanted = list(stage.tape)
        if with_state and stage.state is not None:
            wanted.append(stage.state)
        self._forward(number, wanted)

    def drop(self, number: int) -> None:
        """Hold state `number` no longer."""
        state = self.chain.stages[number].state
        if state is not None:
            self._builder.drop([state])

    def backward(self, number: int) -> None:
        """The backward pass of a stage whose tape is held; then the tape goes."""
        graph = self.chain.graph
        stage = self.chain.stages[number]
        for op in stage.backward:
            self._builder.recompute(graph.operations[op].inputs)
            self._builder.run(op)
        self._builder.drop(v for op in stage.forward for v in graph.operations[op].outputs)

    def schedule(self) -> Schedule:
        """What was written."""
        return self._builder.schedule()

    def _forward(self, number: int, wanted: Sequence[int]) -> None:
        stage = self.chain.stages[number]
        if number < self._next:
            self._builder.recompute(wanted)
            return
        self._next = number + 1
        graph = self.chain.graph
        for op in stage.forward:
            self._builder.run(op)
        made = (v for op in stage.forward for v in graph.operations[op].outputs)
        stay = {*wanted, *self.chain.kept}
        self._builder.drop(v for v in made if v not in stay)


def _coarsened(graph: Graph, cuts: dict[int, int], count: int) -> dict[int, int]:
    """At most `MAX_STAGES` - 1 of the cut points, and one for each state (the latest)."""
    latest = {state: op for op, state in cuts.items()}
    ends = sorted(latest.values())
    before = [0.0]
    for operation in graph.operations[:count]:
        before.append(before[-1] + operation.cost_s)
    while len(ends) >= MAX_STAGES:
        edges = [-1, *ends, count - 1]
        joined_s = [before[edges[i + 2] + 1] - before[edges[i] + 1] for i in range(len(ends))]
        del ends[joined_s.index(min(joined_s))]
    return {op: cuts[op] for op in ends}
