"""Captures of models whose frozen weights are tensors that consist of others, as torchao's are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import remat


class ScaledInt8(torch.Tensor):
    """Integers in 8 bits with a scale for each row; `F.linear` dequantizes it."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> ScaledInt8:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, integers.shape, dtype=dtype, device=integers.device
        )

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> ScaledInt8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["integers", "scale"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], options: dict[str, Any], size: Any, stride: Any
    ) -> ScaledInt8:
        return cls(parts["integers"], parts["scale"], options["dtype"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.integers.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            weight = args[0]
            new = cls(func(weight.integers), func(weight.scale), weight.dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, new)
        raise NotImplementedError(f"{func}")


class Block(nn.Module):
    """A block with a low-rank adapter at its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x) + self.b(self.a(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    for block in blocks:
        assert isinstance(block, Block)
        for layer in (block.up, block.down):
            layer.requires_grad_(False)
            layer.weight = nn.Parameter(ScaledInt8.of(layer.weight.data), requires_grad=False)
    return blocks


def batch() -> torch.Tensor:
    return torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_the_parts_are_inputs_of_the_step(device: str) -> None:
    trace = remat.trace(model(), (batch(),), device=device)
    buffers = {p.target: p.tensor.dtype for p in trace.placeholders if p.kind == "buffer"}
    assert buffers == {
        f"{block}.{layer}.weight.{part}": dtype
        for block in range(3)
        for layer in ("up", "down")
        for part, dtype in (("integers", "int8"), ("scale", "float32"))
    }


def test_the_model_is_unchanged_after_a_capture() -> None:
    captured = model()
    before = [captured[0].up.weight, captured[0].up.weight.integers]
    remat.trace(captured, (batch(),), device="h100")
    after = [captured[0].up.weight, captured[0].up.weight.integers]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_a_plan_has_the_gradients_of_the_model() -> None:
    eager = model()
    planned = remat.optimize(copy.deepcopy(eager), "50%", (batch(),), costs=remat.Roofline("cpu"))
    assert planned.plan.overhead > 0
    losses = [m(batch()).square().mean() for m in (eager, planned)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in planned.named_parameters()}
    for name, parameter in eager.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-8)


def test_other_weights_are_used_at_the_next_call() -> None:
    planned = remat.optimize(model(), "100%", (batch(),), costs=remat.Roofline("cpu"))
    before = planned(batch())
    layer = dict(planned.named_modules())["0.up"]
    layer.weight.scale.mul_(2)
    eager = model()
    eager[0].up.weight.scale.mul_(2)
    assert torch.equal(planned(batch()), eager(batch()))
    assert not torch.equal(before, eager(batch()))
