"""Run a training step, with everything about it recorded, and compare two such steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tests.models import Case
from torch import nn

from remat.frontend.meter import LiveStorageMeter

RELATIVE_ERROR = 1e-5


@dataclass
class Step:
    """What one step computed, and its peak of live storages in bytes, everything included."""

    output: Any
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    input_gradients: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor
    peak_bytes: int


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages under some tensors."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def inputs_of(case: Case) -> list[torch.Tensor]:
    """The tensors among a case's arguments."""
    return [t for t in (*case.args, *case.kwargs.values()) if isinstance(t, torch.Tensor)]


def run_step(model: nn.Module, case: Case, seed: int = 7, *, zero_grad: bool = True) -> Step:
    """One forward and backward under a live-storage meter."""
    if zero_grad:
        model.zero_grad(set_to_none=True)
    for tensor in inputs_of(case):
        tensor.grad = None
    resident = [*model.parameters(), *model.buffers(), *inputs_of(case)]
    resident += [p.grad for p in model.parameters() if p.grad is not None]
    autocast = (
        torch.autocast("cpu", dtype=case.autocast) if case.autocast else contextlib.nullcontext()
    )
    torch.manual_seed(seed)
    meter = LiveStorageMeter(storage_bytes(resident))
    with meter:
        with autocast:
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
    """The same on a copy of the model in eager mode."""
    return run_step(copy.deepcopy(case.model), case, **kwargs)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest element."""
    scale = max(a.abs().max().item(), 1e-30)
    return (a.double() - b.double()).abs().max().item() / scale


def assert_same(found: Step, eager: Step, tolerance: float = RELATIVE_ERROR) -> None:
    """Loss, gradients, mutated buffers and the random generator are eager's."""
    assert type(found.output) is type(eager.output)
    assert relative_error(eager.loss, found.loss) <= tolerance
    assert found.gradients.keys() == eager.gradients.keys()
    for name, expected in eager.gradients.items():
        actual = found.gradients[name]
        assert (actual is None) == (expected is None), name
        if actual is not None and expected is not None:
            assert actual.stride() == expected.stride(), name
            assert relative_error(expected, actual) <= tolerance, name
    for actual, expected in zip(found.input_gradients, eager.input_gradients, strict=True):
        assert relative_error(expected, actual) <= tolerance
    for name, expected in eager.buffers.items():
        assert torch.equal(found.buffers[name], expected), name
    assert torch.equal(found.generator, eager.generator), "the generator advanced differently"
