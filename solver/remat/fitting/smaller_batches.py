"""The option of smaller batches, whose gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator

from remat.documents.trace import trained_parameters
from remat.fitting.question import EagerStep, FitQuestion
from remat.limits.units import format_bytes
from remat.report.fit import ExcludedOption, FitOption

_MAX_BATCHES = 3
_NAME = "smaller batch"


def smaller_batch_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield the largest of some smaller batches that fits."""
    if question.trace_of_batch is None or question.batch is None:
        return
    if question.batch < 2:
        yield ExcludedOption(_NAME, "the batch is 1")
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
    yield option or ExcludedOption(_NAME, _reason(question, question.batch))


def _reason(question: FitQuestion, batch: int) -> str:
    constant_bytes = _constant_bytes(question)
    sample_bytes = -(-_activation_bytes(question) // batch)
    return (
        f"a batch of 1 takes at least {format_bytes(constant_bytes + sample_bytes)}, of which "
        f"{format_bytes(constant_bytes)} are parameters, gradients and the optimizer's state"
    )


def _activation_bytes(question: FitQuestion) -> int:
    """Return what torch's allocator reserves for everything that depends on the batch."""
    memory = question.step.memory(question.optimizer)
    return max(0, memory.reserved_bytes - _constant_bytes(question))


def _constant_bytes(question: FitQuestion) -> int:
    """Return the bytes that do not depend on the batch, libraries included."""
    step = question.step
    parameters = {p.storage for p in trained_parameters(step.trace)}
    gradient_bytes = sum(map(step.trace.allocated_bytes, parameters))
    return step.graph.constant_bytes + gradient_bytes + question.optimizer.state_bytes


def _promising_batches(question: FitQuestion, batch: int) -> list[int]:
    """Return the divisors of a batch that may fit, the largest first, if activations are
    proportional to the batch."""
    constant_bytes = _constant_bytes(question)
    activation_bytes = _activation_bytes(question)
    room_bytes = question.usable_bytes - constant_bytes
    smaller = [b for b in range(batch - 1, 0, -1) if batch % b == 0]
    return [b for b in smaller if activation_bytes * b <= room_bytes * batch]
