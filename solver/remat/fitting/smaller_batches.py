"""The option of smaller batches, whose gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator

from remat.documents.trace import trained_parameters
from remat.fitting.question import EagerStep, FitQuestion
from remat.report.fit import FitOption

_MAX_BATCHES = 3


def smaller_batch_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield the largest of some smaller batches that fits."""
    if question.trace_of_batch is None or question.batch is None or question.batch < 2:
        return
    optimizer = question.optimizer
    option: FitOption | None = None
    for batch in _promising_batches(question, question.batch)[:_MAX_BATCHES]:
        count = question.batch // batch
        step = EagerStep.of(question.trace_of_batch(batch))
        option = question.option(
            f"{count} batches of {batch}",
            step.memory(optimizer),
            count * step.time_s,
            f"(loss / {count}).backward() for {count} batches, then optimizer.step()",
        )
        if option.fits:
            break
    if option is not None:
        yield option


def _promising_batches(question: FitQuestion, batch: int) -> list[int]:
    """Return the divisors of a batch that may fit, the largest first, if activations are
    proportional to the batch."""
    step, optimizer = question.step, question.optimizer
    parameters = {p.storage for p in trained_parameters(step.trace)}
    gradient_bytes = sum(map(step.trace.allocated_bytes, parameters))
    constant_bytes = step.graph.constant_bytes + gradient_bytes + optimizer.state_bytes
    memory = step.memory(optimizer)
    activation_bytes = max(0, memory.reserved_bytes - constant_bytes)
    room_bytes = question.usable_bytes - constant_bytes
    smaller = [b for b in range(batch - 1, 0, -1) if batch % b == 0]
    return [b for b in smaller if activation_bytes * b <= room_bytes * batch]
