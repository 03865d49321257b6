"""The costs of a chain's stages, for Rotor: times, sizes and the peaks within a stage.

In the terms of Beaumont et al., `state_bytes` is a, `saved_bytes` a-bar, `backward_live_bytes`
omega-delta. Where they add overheads to sizes, the peaks within a stage are computed from its
operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.graph import Graph
from remat.strategies.baselines.chains.chain import Chain, Stage
from remat.strategies.baselines.schedule_builder import ScheduleBuilder, segmented_count

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
                    _recompute_s(chain, stage, state),
                    _recompute_s(chain, stage, stage.tape),
                    _recompute_s(chain, stage, saved),
                    sum(sizes[v] for v in state),
                    sum(sizes[v] for v in saved | pinned),
                    sum(sizes[v] for v in live),
                    _peak(graph, stage.forward, free, set(), {*state, *pinned}),
                    _peak(graph, stage.forward, free, set(), saved | pinned),
                    _peak(graph, stage.backward, free, live | set(stage.tape) | pinned, set()),
                )
            )
        columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
        always_live_bytes = graph.constant_bytes + sum(sizes[v] for v in chain.always_retained)
        return cls(*columns, always_live_bytes=always_live_bytes)


def _live_before_backward(graph: Graph, start: int, later: set[int]) -> set[int]:
    """Return the values that the backward pass produced before operation `start` and still needs,
    and the results of the forward operations `later`."""
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


def _recompute_s(chain: Chain, stage: Stage, values: Iterable[int]) -> float:
    """Return the time to recompute values of a stage from the state before it."""
    builder = ScheduleBuilder(chain.graph)
    for op in range(stage.forward[-1] + 1):
        builder.run(op)
    outputs = (v for op in stage.forward for v in chain.graph.operations[op].outputs)
    builder.drop(v for v in outputs if v not in chain.always_retained)
    return sum(chain.graph.operations[op].cost_s for op in builder.missing_operations(values))


def _peak(
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
