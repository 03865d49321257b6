"""Run a training step with everything about it recorded, and compare two such steps."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.helpers.training.models import Case
from tests.helpers.training.random_modules import lean_schedule
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.frontend.common.pytree import flatten
from remat.frontend.memory.meter import LiveStorageMeter

RELATIVE_ERROR = 1e-5


@dataclass
class Step:
    """The results of one step, and its peak of live storages in bytes, everything included."""

    output: Any
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    input_gradients: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor
    peak_bytes: int


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages under some tensors."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def inputs_of(case: Case) -> list[torch.Tensor]:
    """Return the tensors among a case's arguments."""
    return [t for t in (*case.args, *case.kwargs.values()) if isinstance(t, torch.Tensor)]


def autocast_of(case: Case) -> contextlib.AbstractContextManager[object]:
    """Return the autocast context of a case."""
    if case.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=case.autocast)


def run_step(model: nn.Module, case: Case, seed: int = 7, *, zero_grad: bool = True) -> Step:
    """Run one forward and backward under a live-storage meter."""
    if zero_grad:
        model.zero_grad(set_to_none=True)
    for tensor in inputs_of(case):
        tensor.grad = None
    resident = [*model.parameters(), *model.buffers(), *inputs_of(case)]
    resident += [p.grad for p in model.parameters() if p.grad is not None]
    torch.manual_seed(seed)
    meter = LiveStorageMeter(storage_bytes(resident))
    with meter:
        with autocast_of(case):
            output = model(*case.args, **case.kwargs)
        loss = case.loss(output)
        loss.backward()
    return Step(
        output=output,
        loss=loss.detach(),
        gradients={name: p.grad for name, p in model.named_parameters()},
        input_gradients=[t.grad for t in inputs_of(case) if t.grad is not None],
        buffers=dict(model.named_buffers()),
        generator=torch.get_rng_state(),
        peak_bytes=meter.peak_bytes,
    )


def eager_step(case: Case, **kwargs: Any) -> Step:
    """Run the same step on a copy of the model in eager mode."""
    return run_step(copy.deepcopy(case.model), case, **kwargs)


def assert_eager_when_recomputed(
    case: Case, retained_share: float = 0.3, seed: int = 0
) -> remat.Trace:
    """Check a step that retains only a random share of the forward's values: it equals eager
    mode's bit for bit, and its peak is at most the predicted one and within 1% of it."""
    eager = eager_step(case)
    with autocast_of(case):
        trace = remat.trace(case.model, case.args, case.kwargs)
    trace = remat.measure(trace, remat.Roofline("cpu"))
    schedule = lean_schedule(trace.graph(), random.Random(seed), retained_share)
    assert sum(schedule.recomputed(trace.graph()).values()) > 0
    program = remat.rewrite(trace, schedule)
    step = run_step(remat.lower(program, copy.deepcopy(case.model)), case)
    assert_same(step, eager, tolerance=0.0)
    assert step.peak_bytes <= program.predicted_peak_bytes
    assert step.peak_bytes >= 0.99 * program.predicted_peak_bytes
    return trace


def outputs_of(step: Step) -> list[torch.Tensor]:
    """Return the tensors of the model's output."""
    return flatten(step.output, "the output ")[0]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference relative to the largest element."""
    scale = max(a.abs().max().item(), 1e-30)
    return (a.double() - b.double()).abs().max().item() / scale


def assert_same(actual_step: Step, eager: Step, tolerance: float = RELATIVE_ERROR) -> None:
    """Check that loss, gradients, mutated buffers and the random generator are eager mode's."""
    assert type(actual_step.output) is type(eager.output)
    assert relative_error(eager.loss, actual_step.loss) <= tolerance
    for actual, expected in zip(outputs_of(actual_step), outputs_of(eager), strict=True):
        assert actual.dtype == expected.dtype
        assert relative_error(expected, actual) <= tolerance
    assert actual_step.gradients.keys() == eager.gradients.keys()
    for name, expected in eager.gradients.items():
        actual = actual_step.gradients[name]
        assert (actual is None) == (expected is None), name
        if actual is not None and expected is not None:
            assert actual.stride() == expected.stride(), name
            assert actual.dtype == expected.dtype, name
            assert relative_error(expected, actual) <= tolerance, name
    for actual, expected in zip(actual_step.input_gradients, eager.input_gradients, strict=True):
        assert relative_error(expected, actual) <= tolerance
    for name, expected in eager.buffers.items():
        assert torch.equal(actual_step.buffers[name], expected), name
    assert torch.equal(actual_step.generator, eager.generator), "the generator advanced differently"


class RecordedCalls(TorchDispatchMode):
    """A mode that records the overloads that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})
