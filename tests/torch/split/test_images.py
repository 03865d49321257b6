"""Operators on images run on some samples at a time, or on some pixels, with equal gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.recorded_steps import relative_error
from torch import Tensor, nn

import remat
from remat.documents.trace import Trace
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.passes.split.image_rules import IMAGE_RULES
from remat.passes.split.obstacle import split_obstacle
from remat.passes.split.splits import split_largest_operations
from remat.schedule import Schedule

COSTS = remat.Roofline("cpu")
SAMPLES, CLASSES = 6, 40


class Segmentation(nn.Module):
    """A head of one pixel, as many models for segmentation have; `loss` compares with labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], head: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2)
        )
        self.head = head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.interpolate(self.body(images), scale_factor=4.0, mode="bilinear")
        return self.loss(self.head(x), labels)


def dice(scores: Tensor, labels: Tensor) -> Tensor:
    share = scores.softmax(1)
    expected = F.one_hot(labels, CLASSES).movedim(-1, 1)
    both = (share * expected).sum((0, 2, 3))
    return 1 - (2 * both / (share.sum((0, 2, 3)) + expected.sum((0, 2, 3)))).mean()


class Diffusion(nn.Module):
    """A small U-Net of convolutions that predicts noise."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, stride=2, padding=1, padding_mode="reflect")
        self.time = nn.Linear(1, 16)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1))
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Sequential(nn.GroupNorm(1, 19), nn.SiLU(), nn.Conv2d(19, 12, 3, padding=1))

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        noisy = images + noise * times[:, None, None, None]
        x = self.down(noisy) + self.time(times[:, None])[:, :, None, None]
        x = torch.cat([self.up(torch.cat([x, self.middle(x)], 1)), noisy], 1)
        predicted = F.avg_pool2d(F.pixel_shuffle(self.out(F.pad(x, (1, 1, 1, 1))), 2), 2)
        return F.mse_loss(predicted[:, :, 1:-1, 1:-1], noise)


def segmentation_batch() -> dict[str, Tensor]:
    return {
        "images": torch.randn(SAMPLES, 3, 32, 32),
        "labels": torch.randint(CLASSES, (SAMPLES, 32, 32)),
    }


def diffusion_batch() -> dict[str, Tensor]:
    images = torch.randn(SAMPLES, 3, 32, 32)
    return {"images": images, "noise": torch.randn_like(images), "times": torch.rand(SAMPLES)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "cross-entropy of pixels": lambda: (
        Segmentation(F.cross_entropy, nn.Conv2d(8, CLASSES, 1)),
        segmentation_batch(),
    ),
    "dice": lambda: (Segmentation(dice, nn.Conv2d(8, CLASSES, 1)), segmentation_batch()),
    "a head of 3 x 3 pixels": lambda: (
        Segmentation(F.cross_entropy, nn.Conv2d(8, CLASSES, 3, padding=1)),
        segmentation_batch(),
    ),
    "diffusion": lambda: (Diffusion(), diffusion_batch()),
}


def in_format(
    model: nn.Module, batch: dict[str, Tensor], memory_format: torch.memory_format
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Convert images and convolutions to this memory format, and floating point to float64."""
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    if memory_format == torch.channels_last:
        batch = {
            n: t.to(memory_format=memory_format) if t.ndim == 4 else t for n, t in batch.items()
        }
    return model.double().to(memory_format=memory_format), batch  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "memory_format"),
    [
        ("dice", torch.channels_last),
        *(
            pytest.param(name, memory_format, marks=pytest.mark.slow)
            for name in MODELS
            for memory_format in (torch.contiguous_format, torch.channels_last)
        ),
    ],
)
def test_a_step_in_pieces_is_the_same(name: str, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model, batch = in_format(*MODELS[name](), memory_format)
    trace = remat.measure(remat.trace(model, (), batch), COSTS)
    split = trace
    for _ in range(4):
        split = remat.measure(split_largest_operations(split, 16), COSTS)
    assert split.splits
    assert split_obstacle(trace, split) == ""
    step = remat.solve_step(trace, "min", split=16)
    planned_model = copy.deepcopy(model)
    planned = remat.lower(remat.rewrite(step.trace, step.plan.schedule), planned_model)
    with LiveStorageMeter(unique_bytes([*model.parameters(), *batch.values()])) as meter:
        loss = planned(**batch)
        loss.backward()
    assert meter.peak_bytes <= step.plan.peak_bytes
    assert step.plan.peak_bytes < 0.8 * remat.solve(trace, "min").peak_bytes
    expected = model(**batch)
    expected.backward()
    assert relative_error(expected, loss) < 1e-10
    for got, reference in zip(planned_model.parameters(), model.parameters(), strict=True):
        assert got.grad is not None
        assert reference.grad is not None
        assert relative_error(reference.grad, got.grad) < 1e-10


def kernel() -> Tensor:
    return torch.linspace(-1, 1, 72, dtype=torch.float64).reshape(4, 2, 3, 3)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 5),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 5),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "nearest-exact": lambda x: F.interpolate(x, 17, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, 17, mode="bilinear"),
    "bilinear, antialiased": lambda x: F.interpolate(x, 5, mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, 17, mode="bicubic"),
    "reflection": lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "replication": lambda x: F.pad(x, (1, 2, 3, 0), mode="replicate"),
    "zeros": lambda x: F.pad(x, (1, 2, 3, 0)),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "group_norm": lambda x: F.group_norm(x, 2),
    "index": lambda x: x[:, :, torch.tensor([3, 1, 1])],
    "neighbouring indices": lambda x: x[:, :, torch.tensor([3, 1]), torch.tensor([0, 5])],
    "transposed convolution": lambda x: F.conv_transpose2d(x, kernel(), stride=2),
    "grouped convolution": lambda x: F.conv2d(x, kernel(), groups=2, dilation=2),
}


class Between(nn.Module):
    """An operator between large tensors, all elements of a sample of which depend on each other."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator
        self.grid = nn.Parameter(torch.randn(4, 12, 12, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.operator((x * self.grid).sin())
        return y.flatten(1).log_softmax(1).square().mean()


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_on_images_runs_in_pieces(name: str) -> None:
    trace, split = split_between(OPERATORS[name])
    in_pieces = {node.piece_of for node in split.nodes if node.piece_of}
    between = [
        node.name for node in trace.nodes if node.target.removeprefix("aten.") in IMAGE_RULES
    ]
    assert in_pieces.issuperset(between)
    assert between


MOVED_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.index_put.default": lambda x: torch.ops.aten.index_put(
        x, [None, torch.arange(24).reshape(6, 4) % 4], x[:, :4, :12], True
    ),
    "aten.index.Tensor": lambda x: x[:, torch.tensor([0, 1]), :, torch.tensor([2, 3])],
}
"""Values without a dimension of the place, and indices that are not adjacent."""


@pytest.mark.parametrize("target", MOVED_ROWS)
def test_indexing_that_moves_the_rows_is_not_split(target: str) -> None:
    trace, split = split_between(MOVED_ROWS[target])
    assert target in {node.target for node in trace.nodes}
    assert target not in {node.target for node in split.nodes if node.piece_of}


def split_between(operator: Callable[[Tensor], Tensor]) -> tuple[Trace, Trace]:
    """Return a step with the operator, and the step in pieces, of which eager gradients are
    checked."""
    torch.manual_seed(0)
    model = Between(operator)
    x = torch.randn(SAMPLES, 1, 1, 1, dtype=torch.float64)
    trace = remat.measure(remat.trace(model, (x,)), COSTS)
    split = remat.measure(split_largest_operations(trace, SAMPLES), COSTS)
    schedule = Schedule.keep_all(split.graph())
    planned = remat.lower(remat.rewrite(split, schedule), copy.deepcopy(model))
    for module in (model, planned):
        module(x).backward()
    gradients: list[Any] = [m.get_parameter("grid").grad for m in (model, planned)]
    assert relative_error(*gradients) < 1e-10
    return trace, split
