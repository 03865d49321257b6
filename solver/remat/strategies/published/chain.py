"""The training step as a heterogeneous chain, for Revolve and Rotor, with the costs of its stages.

The operations between two cut points (see `baselines.module_blocks`) are a *stage*. Stage s reads
state s - 1 and produces state s; its *tape* consists of its outputs that its backward pass reads.

Backward operations belong to the latest stage whose tape they, or any after them, read: so the
backward pass is one stage after the other, from the last to the first.

In the terms of Beaumont et al., `state_bytes` is a, `saved_bytes` a-bar, `backward_live_bytes`
omega-delta. Where they add overheads to sizes, the peaks within a stage are computed from its
operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.errors import RematError
from remat.graph import Graph
from remat.schedule import Schedule
from remat.strategies.baselines.module_blocks import cut_points
from remat.strategies.baselines.schedule_builder import (
    ScheduleBuilder,
    forward_count,
    segmented_count,
    segments_ending_at,
)

MAX_STAGES = 100
"""Longer chains are shortened by merging the cheapest neighbours: Rotor takes cubic time."""

_MAX_STAGE_SHARE = 2 / 3
"""Share of the forward time in one stage above which a graph is no chain."""


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
        """Return the chain of a graph. Raises `RematError`, with the name of this strategy, if the
        graph is no chain or has no backward pass."""
        count = forward_count(graph)
        if count is None:
            raise RematError(
                f"{strategy} needs to know where the backward pass begins, and no operation is "
                "marked `backward`: mark them, or use ChenSqrt"
            )
        cuts = _cuts_of_merged_stages(graph, cut_points(graph), count)
        forward = segments_ending_at([*cuts, count - 1])
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

    def advance(self, first: int, end: int) -> None:
        """Run the stages from `first` to before `end` from the state before them, and retain only
        the state that the last of them produces."""
        for number in range(first, end):
            state = self.chain.stages[number].state
            self._run_stage(number, [] if state is None else [state])
            if number > first:
                self.drop(number - 1)

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


def _cuts_of_merged_stages(graph: Graph, cuts: dict[int, int], count: int) -> dict[int, int]:
    """Return at most `MAX_STAGES` - 1 of the cut points with their states, one for each state (the
    latest). Cut points between the cheapest neighbours are left out."""
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


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChainCosts:
    """One entry per stage, in seconds and bytes; the state that a stage reads is never counted.

    `advance_s` is the time to recompute a stage's state, `tape_s` its tape, `tape_and_state_s`
    both. `state_bytes` and `saved_bytes` (tape and state) remain afterwards. `backward_live_bytes`
    are live before the backward pass of a stage begins: gradients, and results so far.
    `advance_bytes`, `tape_bytes` and `backward_bytes` are the peaks while a stage advances, is run
    for its tape, and runs its backward pass (the latter includes `backward_live_bytes`).
    `always_live_bytes` are live all the time: constant memory, and values that cross cut points in
    addition to the states.
    """

    advance_s: Floats
    tape_s: Floats
    tape_and_state_s: Floats
    state_bytes: Floats
    saved_bytes: Floats
    backward_live_bytes: Floats
    advance_bytes: Floats
    tape_bytes: Floats
    backward_bytes: Floats
    always_live_bytes: int

    @classmethod
    def of(cls, chain: Chain) -> ChainCosts:
        """Compute the costs from the operations of each stage."""
        graph = chain.graph
        sizes = [value.size_bytes for value in graph.values]
        free = set(chain.always_retained)
        rows: list[tuple[float, ...]] = []
        forward_end = segmented_count(graph)
        backward_starts = [0] * len(chain.stages)
        for number in reversed(range(len(chain.stages))):
            backward_starts[number] = forward_end
            forward_end += len(chain.stages[number].backward)
        for number, stage in enumerate(chain.stages):
            state = [] if stage.state is None else [stage.state]
            saved = {*stage.tape, *state}
            later = {op for after in chain.stages[number + 1 :] for op in after.forward}
            live = _live_before_backward(graph, backward_starts[number], later)
            pinned = {v for v in graph.results if graph.producer[v] in stage.forward}
            rows.append(
                (
                    _stage_recompute_s(chain, stage, state),
                    _stage_recompute_s(chain, stage, stage.tape),
                    _stage_recompute_s(chain, stage, saved),
                    sum(sizes[v] for v in state),
                    sum(sizes[v] for v in saved | pinned),
                    sum(sizes[v] for v in live),
                    _stage_peak_bytes(graph, stage.forward, free, set(), {*state, *pinned}),
                    _stage_peak_bytes(graph, stage.forward, free, set(), saved | pinned),
                    _stage_peak_bytes(
                        graph, stage.backward, free, live | set(stage.tape) | pinned, set()
                    ),
                )
            )
        columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
        always_live_bytes = graph.constant_bytes + sum(sizes[v] for v in chain.always_retained)
        return cls(*columns, always_live_bytes=always_live_bytes)


def _live_before_backward(graph: Graph, start: int, later: set[int]) -> set[int]:
    """Return the values that the backward pass produced before operation `start` and still needs,
    and the results of the forward operations `later`, which come after the stage."""
    forward_end = segmented_count(graph)
    return {
        v
        for v, producer in enumerate(graph.producer)
        if (
            forward_end <= producer < start
            and (v in graph.results or max(graph.consumers[v], default=-1) >= start)
        )
        or (producer in later and v in graph.results)
    }


def _stage_recompute_s(chain: Chain, stage: Stage, values: Iterable[int]) -> float:
    """Return the time to recompute values of a stage from the state before it."""
    builder = ScheduleBuilder(chain.graph)
    for op in range(stage.forward[-1] + 1):
        builder.run(op)
    outputs = (v for op in stage.forward for v in chain.graph.operations[op].outputs)
    builder.drop(v for v in outputs if v not in chain.always_retained)
    return sum(chain.graph.operations[op].cost_s for op in builder.missing_operations(values))


def _stage_peak_bytes(
    graph: Graph, ops: tuple[int, ...], free: set[int], before: set[int], after: set[int]
) -> int:
    """Return the most that `ops` need at once, with the values `before` live at the start, and
    `after` and results live to the end; `free` values do not count."""
    last = {v: op for op in ops for v in graph.operations[op].inputs}
    live = before - free
    size = sum(graph.values[v].size_bytes for v in live)
    peak = size
    for op in ops:
        operation = graph.operations[op]
        produced = {v for v in operation.outputs if v not in free}
        size += sum(graph.values[v].size_bytes for v in produced)
        live |= produced
        peak = max(peak, size + operation.workspace_bytes)
        for v in (*operation.outputs, *operation.inputs):
            is_dead = last.get(v, -1) <= op and v not in after and v not in graph.results
            outlives = v not in last and v in before
            crosses = any(user > ops[-1] for user in graph.consumers[v]) and operation.backward
            if v in live and is_dead and not outlives and not crosses:
                live.remove(v)
                size -= graph.values[v].size_bytes
    return peak
