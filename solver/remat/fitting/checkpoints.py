"""The option of `torch.utils.checkpoint` around each block."""

from __future__ import annotations

from collections.abc import Iterator

from remat.fitting.question import EagerStep, FitQuestion
from remat.report.fit import ExcludedOption, FitOption
from remat.schedule import Schedule
from remat.simulate import baseline_of, peak_and_time
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import (
    checkpoint_segments,
    eager_backward_order,
)


def checkpoint_schedule(step: EagerStep) -> Schedule | None:
    """Return the schedule with a checkpoint for each block; None without blocks."""
    blocks = find_blocks(step.trace.graph())
    if not blocks:
        return None
    backward = eager_backward_order(step.graph)
    return checkpoint_segments(step.graph, blocks, backward=backward)


def checkpoint_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield checkpoints, with the largest optimizer that fits."""
    graph = question.step.graph
    schedule = checkpoint_schedule(question.step)
    if schedule is None:
        yield ExcludedOption("checkpoints of blocks", "the model has no repeated blocks")
        return
    if peak_and_time(graph, schedule)[0] >= baseline_of(graph).peak_bytes:
        yield ExcludedOption("checkpoints of blocks", "the peak would be no smaller")
        return
    step_s = sum(graph.operations[op].cost_s for op in schedule.runs)
    options = []
    for optimizer in question.optimizers_to_combine():
        memory = question.step.memory(optimizer, schedule)
        code = question.script.checkpoints or "torch.utils.checkpoint.checkpoint around each block"
        if optimizer.name != question.optimizer_name:
            code = f"optimizer = {optimizer.code}; {code}"
        name = question.name_with_optimizer("checkpoint each block", optimizer)
        options.append(question.option(name, memory, step_s, code))
    if not options:
        yield ExcludedOption("checkpoints of blocks", question.reason_of_optimizers())
    fitting = [option for option in options if option.fits]
    yield from (fitting or options)[:1]
