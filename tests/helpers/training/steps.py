"""One training step of a model: its loss, gradients and buffers, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tests.helpers.training.models import Case
from torch import nn

from remat.frontend.memory.meter import measure_step


class Step(NamedTuple):
    """The loss, the gradients of parameters (by name) and inputs ("in0"), and the buffers."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model's output: the output, or its first element."""
    return output if isinstance(output, torch.Tensor) else output[0]


def step(
    model: nn.Module,
    *args: Any,
    run: Callable[..., Any] | None = None,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    seed: int = 1,
    autocast: torch.dtype | None = None,
    **kwargs: Any,
) -> Step:
    """Run one step of a model, or of `run`, which is the same model planned or compiled."""
    model.zero_grad(set_to_none=True)
    inputs = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    for tensor in inputs:
        tensor.grad = None
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        output = (model if run is None else run)(*args, **kwargs)
    value = loss(output)
    value.backward()
    return results(model, value, inputs)


def results(model: nn.Module, loss: torch.Tensor, inputs: Sequence[torch.Tensor] = ()) -> Step:
    """Return the results of a step after its backward."""
    named = {**dict(model.named_parameters()), **{f"in{i}": t for i, t in enumerate(inputs)}}
    gradients = {name: t.grad.clone() for name, t in named.items() if t.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Step(loss.detach(), gradients, buffers)


def step_of(case: Case, run: Callable[..., Any] | None = None, seed: int = 1) -> Step:
    """Run one step of a case's model, or of `run`."""
    return step(
        case.model, *case.args,
        run=run, loss=case.loss, seed=seed, autocast=case.autocast, **case.kwargs,
    )  # fmt: skip


def peak_of(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    **kwargs: Any,
) -> int:
    """Return the peak in bytes of one step on the CPU, parameters and batch included. No gradients
    stay in memory."""

    def one() -> None:
        loss(model(*args, **kwargs)).backward()

    model.zero_grad(set_to_none=True)
    inputs = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    constants = [*model.parameters(), *model.buffers(), *inputs]
    peak_bytes = measure_step(one, constants).peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


def assert_same(actual: Step, expected: Step, tolerance: float = 0.0) -> None:
    """Check that losses, gradients and buffers are equal, or agree within a relative tolerance."""
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=0)
    for tensors, others in ((actual[1], expected[1]), (actual[2], expected[2])):
        assert tensors.keys() == others.keys()
        sizes = {n: t.double().abs().max().item() for n, t in others.items() if t.numel()}
        # A tensor that is zero up to rounding has no relative error.
        least = 1e-2 * max(sizes.values(), default=0.0)
        for name, size in sizes.items():
            difference = (others[name].double() - tensors[name].double()).abs().max().item()
            assert difference <= tolerance * max(size, least), name


def assert_same_gradients(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    """Check that two models have the same gradients and buffers."""
    loss = torch.zeros(())
    assert_same(results(model, loss), results(other, loss), tolerance)


def assert_same_steps(
    model: nn.Module,
    other: nn.Module,
    *args: Any,
    seeds: Iterable[int] = (1,),
    tolerance: float = 0.0,
    **options: Any,
) -> None:
    """Check that steps of two models with these seeds have the same results. `options` are for
    `step`."""
    for seed in seeds:
        expected = step(other, *args, seed=seed, **options)
        assert_same(step(model, *args, seed=seed, **options), expected, tolerance)
