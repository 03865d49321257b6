"""A capture has the operators that eager mode runs, also where torch's Python kernels decompose
them, or add a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest to a size": lambda x: F.interpolate(x, size=(5, 7)),
    "nearest-exact": lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, aligned": lambda x: F.interpolate(
        x, size=(9, 11), mode="bilinear", align_corners=True
    ),
    "bilinear, antialiased": lambda x: F.interpolate(
        x, scale_factor=0.5, mode="bilinear", antialias=True
    ),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "linear": lambda x: F.interpolate(x[..., 0], scale_factor=2, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "nearest of a sequence": lambda x: F.interpolate(x[..., 0], scale_factor=2),
    "nearest of a volume": lambda x: F.interpolate(x[None], scale_factor=2),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "multi-margin loss": lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([1, 0])),
    "multilabel-margin loss": lambda x: F.multilabel_margin_loss(
        x.flatten(1), torch.zeros(2, 192, dtype=torch.long)
    ),
    "dropout of probability 0": lambda x: F.dropout(x, 0.0),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "matmul": lambda x: x @ x[0],
    "matmul of a vector": lambda x: x @ x[0, 0, 0],
    "grid sample": lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "glu": lambda x: F.glu(x),
    "celu": F.celu,
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
}

COPIES = {"aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.detach.default"}


class Layer(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(1)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight).sum()


class OperatorNames(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_capture_has_the_operators_of_eager_mode(name: str) -> None:
    model = Layer(FUNCTIONS[name])
    with OperatorNames() as eager:
        model(images()).backward()
    trace = remat.trace(model, (images(),))
    captured = {node.target for node in trace.nodes} - COPIES
    for target in captured - eager.names:
        assert target.endswith(("view.default", "copy.default", "clone.default")), target
    layer = remat.optimize(Layer(FUNCTIONS[name]), "100%", (images(),), costs=remat.Roofline("cpu"))
    expected = model(images())
    assert torch.equal(layer(images()), expected)


@pytest.mark.parametrize("name", ["dropout of probability 0", "dropout in evaluation"])
def test_a_dropout_that_is_off_is_no_copy_on_an_absent_gpu(name: str) -> None:
    trace = remat.trace(Layer(FUNCTIONS[name]), (images(),), device="h100")
    assert "aten.clone.default" not in {node.target for node in trace.nodes}
