"""Options that leave the step as it is: other optimizers, another setting of the allocator, and
outputs that the training loop releases."""

from __future__ import annotations

from collections.abc import Iterator

from remat.allocator.prediction import is_on_cuda
from remat.costs.optimizer_memory import smaller_optimizers
from remat.fitting.question import EagerStep, FitQuestion
from remat.limits.options import OUTPUTS_DROPPED
from remat.passes.outputs import loss_code, returns_loss, with_outputs
from remat.report.fit import FitOption


def optimizer_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield the same update rule with less memory."""
    step = question.step
    present = step.memory(question.optimizer)
    for name in smaller_optimizers(question.optimizer_name):
        optimizer = step.optimizer(name)
        memory = step.memory(optimizer)
        if memory.reserved_bytes < present.reserved_bytes:
            note = "its moments are rounded to 8 bits" if name.endswith("8bit") else ""
            code = f"optimizer = {optimizer.code}"
            yield question.option(f"optimizer {name}", memory, step.time_s, code, note)


def segment_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield expandable segments, if less is reserved with them."""
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
    is reserved then."""
    step = question.step
    if step.trace.outputs_dropped or not returns_loss(step.trace):
        return
    released = EagerStep.of(with_outputs(step.trace, OUTPUTS_DROPPED))
    memory = released.memory(question.optimizer)
    if memory.reserved_bytes < step.memory(question.optimizer).reserved_bytes:
        code = f"loss = model(...){loss_code(step.trace)}"
        note = "no variable references the other outputs during loss.backward()"
        yield question.option("other outputs released", memory, step.time_s, code, note)
