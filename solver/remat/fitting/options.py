"""Options that need no solver.

The step stays as it is with another optimizer, with another setting of the allocator, or where the
training loop releases outputs. Batches may be smaller, with accumulated gradients; each block may
be in a `torch.utils.checkpoint`. Several GPUs are in `sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator

from remat.allocator.prediction import is_on_cuda
from remat.costs.optimizer_memory import smaller_optimizers
from remat.fitting.eager import BLOCKS
from remat.fitting.question import RELEASE_CODE, FitQuestion
from remat.limits.options import OUTPUTS_DROPPED
from remat.passes.outputs import (
    loss_code,
    returns_loss,
    with_outputs,
    without_previous_outputs,
)
from remat.report.fit import ExcludedOption, FitOption

_MIN_SAVING = 0.01
"""The share of the reserved bytes that another optimizer saves at least, if it makes nothing
fit."""


def optimizer_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield optimizers with the same update rule that take less memory, if less is reserved
    then."""
    step = question.step
    present = step.memory(question.optimizer)
    for name in smaller_optimizers(question.optimizer_name):
        optimizer = step.optimizer(name)
        memory = step.memory(optimizer)
        is_smaller = memory.reserved_bytes < (1 - _MIN_SAVING) * present.reserved_bytes
        if is_smaller or (question.is_usable(memory) and not question.is_usable(present)):
            note = "its moments are rounded to 8 bits" if name.endswith("8bit") else ""
            if "paged" in name:
                note += ", in unified memory: to move them to the host and back takes time"
            code = f"optimizer = {optimizer.code}"
            yield question.option(f"optimizer {name}", memory, step.time_s, code, note)


def segment_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield expandable segments, if less is reserved with them; nothing for a CPU."""
    memory = question.step.memory(question.optimizer)
    if is_on_cuda(question.step.trace) and memory.expandable_bytes < memory.reserved_bytes:
        yield FitOption(
            "expandable segments",
            memory.peak_bytes,
            memory.expandable_bytes,
            memory.expandable_bytes <= question.usable_bytes,
            question.step.time_s,
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "before Python starts",
        )


def released_output_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield that the training loop releases the outputs but the loss before the backward, if less
    is reserved then. Nothing if it does so already, or the step returns no loss."""
    step = question.step
    if step.trace.outputs_dropped or not returns_loss(step.trace):
        return
    trace = without_previous_outputs(step.trace)
    released = step.with_trace(with_outputs(trace, OUTPUTS_DROPPED))
    memory = released.memory(question.optimizer)
    if memory.reserved_bytes < step.memory(question.optimizer).reserved_bytes:
        code = f"loss = model(...){loss_code(step.trace)}"
        note = "no variable references the other outputs during loss.backward()"
        yield question.option("other outputs released", memory, step.time_s, code, note)


def previous_output_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield that the training loop releases its outputs once the optimizer has run, if it keeps
    them and less is reserved then."""
    if not question.loop.keeps_outputs:
        return
    released = question.with_outputs_released()
    memory = released.step.memory(question.optimizer)
    if memory.reserved_bytes < question.step.memory(question.optimizer).reserved_bytes:
        name = "outputs of the step before released"
        note = "no variable references them during the next forward"
        yield question.option(name, memory, question.step.time_s, RELEASE_CODE, note)


CHECKPOINTS_IN_WORDS = "torch.utils.checkpoint.checkpoint around each block"
"""The code for a model without a method for it."""


def checkpoint_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield a checkpoint for each block, with the largest optimizer that fits, or else with the
    largest; an excluded option without repeated blocks, if the peak would be no smaller, or if no
    optimizer's step fits. Nothing if each block has one already."""
    if question.step.checkpoint == BLOCKS:
        return
    present = question.step
    step = present.with_blocks_checkpointed()
    if step is None:
        yield ExcludedOption("checkpoints of blocks", "the model has no repeated blocks")
        return
    if step.peak_bytes >= present.peak_bytes:
        than = " than with the present checkpoints" if present.checkpoint_count else ""
        reason = f"the peak would be no smaller{than}"
        yield ExcludedOption("checkpoints of blocks", reason)
        return
    options = []
    for optimizer in question.optimizers_to_combine():
        memory = step.memory(optimizer)
        code = question.script.checkpoints or CHECKPOINTS_IN_WORDS
        if optimizer.name != question.optimizer_name:
            code = f"optimizer = {optimizer.code}; {code}"
        name = question.name_with_optimizer("checkpoint each block", optimizer)
        options.append(question.option(name, memory, step.time_s, code))
    if not options:
        yield ExcludedOption("checkpoints of blocks", question.reason_of_optimizers())
    fitting = [option for option in options if option.fits]
    yield from (fitting or options)[:1]
