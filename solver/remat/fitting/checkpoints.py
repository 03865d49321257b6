"""The option of `torch.utils.checkpoint` around each block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from remat.fitting.question import EagerStep, FitQuestion
from remat.graph import Graph
from remat.report.eager_step import eager_graph
from remat.report.fit import ExcludedOption, FitOption
from remat.schedule import Schedule
from remat.simulate import baseline_of, peak_and_time
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import (
    Segments,
    checkpoint_segments,
    eager_backward_order,
    segment_borders,
)

CHECKPOINTS_IN_WORDS = "torch.utils.checkpoint.checkpoint around each block"
"""The code for a model without a method for it."""


def checkpointed_step(step: EagerStep) -> tuple[EagerStep, Schedule] | None:
    """Return the step with a checkpoint for each block, and its schedule; None without blocks."""
    blocks = find_blocks(step.trace.graph())
    if not blocks:
        return None
    borders = segment_borders(step.graph, blocks)
    recomputed = {
        v
        for block in blocks
        for op in block
        for v in step.graph.operations[op].outputs
        if v not in borders
    }
    graph = eager_graph(step.eager_trace, unpacked=recomputed)
    backward = eager_backward_order(graph)
    schedule = checkpoint_segments(graph, blocks, borders, backward)
    graph = _with_retained_arguments(graph, blocks, borders, backward)
    return replace(step, graph=graph), schedule


def _with_retained_arguments(
    graph: Graph, blocks: Segments, borders: Collection[int], backward: Sequence[int]
) -> Graph:
    """Return the graph in which the last operation of a block's backward reads the arguments of the
    block: checkpoints release them once the last saved tensor of the block is."""
    operations = list(graph.operations)
    for block in blocks:
        outputs = {v for op in block for v in operations[op].outputs}
        arguments = {v for op in block for v in operations[op].inputs} - outputs
        saved = outputs.difference(borders)
        last = next((op for op in reversed(backward) if saved & {*operations[op].inputs}), None)
        if last is not None:
            inputs = arguments.union(operations[last].inputs)
            operations[last] = replace(operations[last], inputs=tuple(sorted(inputs)))
    return replace(graph, operations=tuple(operations))


def checkpoint_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield checkpoints, with the largest optimizer that fits."""
    checkpointed = checkpointed_step(question.step)
    if checkpointed is None:
        yield ExcludedOption("checkpoints of blocks", "the model has no repeated blocks")
        return
    step, schedule = checkpointed
    if peak_and_time(step.graph, schedule)[0] >= baseline_of(question.step.graph).peak_bytes:
        yield ExcludedOption("checkpoints of blocks", "the peak would be no smaller")
        return
    step_s = sum(step.graph.operations[op].cost_s for op in schedule.runs)
    options = []
    for optimizer in question.optimizers_to_combine():
        memory = step.memory(optimizer, schedule)
        code = question.script.checkpoints or CHECKPOINTS_IN_WORDS
        if optimizer.name != question.optimizer_name:
            code = f"optimizer = {optimizer.code}; {code}"
        name = question.name_with_optimizer("checkpoint each block", optimizer)
        options.append(question.option(name, memory, step_s, code))
    if not options:
        yield ExcludedOption("checkpoints of blocks", question.reason_of_optimizers())
    fitting = [option for option in options if option.fits]
    yield from (fitting or options)[:1]
