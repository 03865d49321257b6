"""The option of smaller batches, whose gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator

from remat.documents.trace import Trace, trained_parameters
from remat.errors import TraceError, one_line
from remat.fitting.question import EagerStep, FitQuestion
from remat.limits.units import format_bytes
from remat.report.fit import ExcludedOption, FitOption

_MAX_BATCHES = 3
_NAME = "smaller batch"


def smaller_batch_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield the largest of some smaller batches that fits, else the smallest of these."""
    if question.trace_of_batch is None or question.batch is None:
        return
    if question.batch < 2:
        yield ExcludedOption(_NAME, "the batch is 1")
        return
    constant_bytes = _constant_bytes(question)
    if constant_bytes > question.usable_bytes:
        constant = format_bytes(constant_bytes)
        reason = f"parameters, gradients, optimizer state and libraries take {constant}"
        yield ExcludedOption(_NAME, f"{reason} with any batch")
        return
    option: FitOption | ExcludedOption | None = None
    for batch in _promising_batches(question, question.batch)[:_MAX_BATCHES] or [1]:
        try:
            option = _option(question, batch, question.trace_of_batch(batch))
        except TraceError as error:  # such as batch norm of one sample
            reason = f"a batch of {batch} cannot be traced: {one_line(error)}"
            option = ExcludedOption(_NAME, reason)
            break
        if option.fits:
            break
    if option is not None:
        yield option


def _option(question: FitQuestion, batch: int, trace: Trace) -> FitOption:
    """Return the option to accumulate the gradients of smaller batches, of which one is traced."""
    count = (question.batch or 1) // batch
    step = EagerStep.of(trace)
    return question.option(
        f"{count} batches of {batch}",
        step.memory(question.optimizer),
        count * step.time_s,
        f"(loss / {count}).backward() for {count} batches, then optimizer.step()",
    )


def _activation_bytes(question: FitQuestion) -> int:
    """Return what torch's allocator reserves for everything that depends on the batch."""
    memory = question.step.memory(question.optimizer)
    return max(0, memory.reserved_bytes - _constant_bytes(question))


def _constant_bytes(question: FitQuestion) -> int:
    """Return the bytes that do not depend on the batch, libraries and buffers included."""
    step = question.step
    parameters = {p.storage for p in trained_parameters(step.trace)}
    gradient_bytes = sum(map(step.trace.allocated_bytes, parameters))
    inputs = {p.storage for p in step.trace.placeholders if p.kind == "input"}
    input_bytes = sum(map(step.trace.allocated_bytes, inputs))
    constant_bytes = step.graph.constant_bytes - input_bytes
    return constant_bytes + gradient_bytes + question.optimizer.state_bytes


def _promising_batches(question: FitQuestion, batch: int) -> list[int]:
    """Return the divisors of a batch that may fit, the largest first, if activations are
    proportional to the batch."""
    constant_bytes = _constant_bytes(question)
    activation_bytes = _activation_bytes(question)
    room_bytes = question.usable_bytes - constant_bytes
    smaller = [b for b in range(batch - 1, 0, -1) if batch % b == 0]
    return [b for b in smaller if activation_bytes * b <= room_bytes * batch]
