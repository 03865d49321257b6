"""torch.compile(backend="remat") with dynamic shapes: every kind of input and output, forwards and
backward, over three sizes, with eager mode's values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

pytestmark = [
    pytest.mark.usefixtures("empty_compile_caches"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SIZES = (6, 9, 14)
WIDTH = 8


@dataclass
class Result:
    """An output with fields, as those of Transformers."""

    loss: torch.Tensor
    logits: torch.Tensor | None = None
    rows: int = 0


Function = Callable[["Layers", torch.Tensor], Any]


class Layers(nn.Module):
    """Two layers, and a function of the hidden rows that makes the outputs."""

    rows: torch.Tensor

    def __init__(self, outputs: Function) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros(()))
        self.outputs = outputs

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.outputs(self, self.down(F.gelu(self.up(x))), *args, **kwargs)


def loss_of(h: torch.Tensor) -> torch.Tensor:
    return h.square().mean()


def counted(model: Layers, h: torch.Tensor) -> torch.Tensor:
    model.rows.add_(h.shape[0])
    return loss_of(h) / h.shape[0]


def broken(_: Layers, h: torch.Tensor) -> Any:
    rows, half, is_large = h.shape[0] * 2, h.shape[0] / 2, h.shape[0] > 2
    g = h.tanh()
    torch._dynamo.graph_break()
    return {
        "loss": loss_of(g.reshape(-1)[:rows]) * half,
        "rows": rows,
        "is_large": is_large,
        "g": g,
    }


def dropped_rows(_: Layers, h: torch.Tensor) -> Any:
    return loss_of(h[1:]), h[:-1], h.T, h.flatten(), h.unsqueeze(0).expand(3, -1, -1)


OUTPUTS: dict[str, Function] = {
    "a loss": lambda _, h: loss_of(h),
    "a loss and logits": lambda _, h: (loss_of(h), h),
    "logits before a loss": lambda _, h: (h, h.sin(), loss_of(h)),
    "logits alone": lambda _, h: h,
    "a dataclass": lambda _, h: Result(loss_of(h), h, h.shape[0]),
    "a dict": lambda _, h: {"loss": loss_of(h), "logits": {"h": h, "none": None}},
    "a size": lambda _, h: (loss_of(h), h.shape[0]),
    "a size first": lambda _, h: (h.shape[0], loss_of(h), h),
    "a shape": lambda _, h: (loss_of(h), h.shape),
    "sums and products of sizes": lambda _, h: (
        h.shape[0] * 3 + 1,
        h.shape[0] // 2,
        h.numel(),
        loss_of(h),
    ),
    "a float of a size": lambda _, h: (loss_of(h), h.shape[0] / 3, math.sqrt(h.shape[0])),
    "a bool of a size": lambda _, h: (loss_of(h), h.shape[0] > 2, h.shape[0] % 2 == 0),
    "constants": lambda _, h: (loss_of(h), None, 3, 2.5, True, (None, 4)),
    "a tensor without a gradient": lambda _, h: (loss_of(h), h.argmax(-1), h.detach(), h > 0),
    "a mask and a size": lambda _, h: (h > 0, h.shape[0], loss_of(h)),
    "a loss of one element": lambda _, h: (loss_of(h).reshape(1), h),
    "a loss of each row": lambda _, h: (h.square().mean(-1), h.shape[0]),
    "views": dropped_rows,
    "one tensor twice": lambda _, h: (h, loss_of(h), h),
    "no gradient at all": lambda _, h: (h.detach(), h.shape[0]),
    "a scaled loss": lambda _, h: loss_of(h) * h.shape[0] + h.sum() / h.numel(),
    "tensors made of sizes": lambda _, h: (
        loss_of(h * torch.arange(h.shape[0])[:, None]),
        torch.full((h.shape[0],), h.shape[0]),
        torch.zeros(h.shape[0], 2),
    ),
    "a tensor of a size": lambda _, h: (loss_of(h), torch.tensor(h.shape[0]), h.shape[0] + h[0]),
    "an empty tensor": lambda _, h: (loss_of(h), h[:0]),
    "a buffer": counted,
    "across a graph break": broken,
    "a parameter": lambda model, h: (loss_of(h), model.up.weight, model.rows),
}


@dataclass(frozen=True)
class Input:
    """Arguments besides the rows, made for a number of rows, and the outputs made of them."""

    make: Callable[[int], tuple[Any, ...]]
    outputs: Callable[..., Any]


INPUTS: dict[str, Input] = {
    "an int that is a size": Input(lambda n: (n,), lambda _, h, n: (loss_of(h) / n, n + 1)),
    "an int": Input(lambda n: (n * 7,), lambda _, h, n: (loss_of(h) * n, h.roll(n, 0), n)),
    "a float": Input(lambda n: (n * 0.3,), lambda _, h, s: (loss_of(h * s), s, s * 2)),
    "a bool": Input(lambda n: (n > 8,), lambda _, h, b: (loss_of(h) if b else h.mean(), b)),
    "None": Input(lambda n: (None if n > 8 else n,), lambda _, h, o: (loss_of(h), o)),
    "a list of numbers": Input(
        lambda n: ([n, n * 2, 0.5 * n],), lambda _, h, v: (loss_of(h) * v[1] + v[2], v[0])
    ),
    "a dict of tensors": Input(
        lambda n: ({"mask": torch.arange(n) % 2, "scale": 0.25 * n},),
        lambda _, h, d: (loss_of(h * d["mask"][:, None]) * d["scale"], d),
    ),
    "a tensor of a number": Input(
        lambda n: (torch.tensor(n / 2.0),), lambda _, h, t: (loss_of(h) * t, t)
    ),
    "a shape": Input(
        lambda n: (torch.Size((n // 2 * 2, WIDTH)),),
        lambda _, h, s: (loss_of(h[: s[0]].reshape(s)), s),
    ),
    "labels": Input(
        lambda n: (torch.arange(n) % WIDTH,), lambda _, h, labels: (F.cross_entropy(h, labels), h)
    ),
    "an int across a graph break": Input(
        lambda n: (n, n / 4),
        lambda _, h, n, s: (torch._dynamo.graph_break(), loss_of(h) * n * s, n - 1, s),
    ),
}


def results(
    model: Layers, run: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], rows: int
) -> tuple[Any, list[torch.Tensor | None]]:
    """Return the outputs of a step, and the gradients of parameters and rows."""
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    model.zero_grad(set_to_none=True)
    outputs = run(x, *make(rows))
    fields = vars(outputs) if isinstance(outputs, Result) else outputs
    losses = [
        leaf.sum()
        for leaf in tree_leaves(fields)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()
    detached = tree_map_only(torch.Tensor, torch.detach, fields)
    return detached, [p.grad for p in (*model.parameters(), x)]


def check(
    outputs: Function, make: Callable[[int], tuple[Any, ...]], options: dict[str, Any], **more: Any
) -> None:
    """Compare steps of three sizes with eager mode's. The second one makes the sizes dynamic."""
    torch.manual_seed(0)
    model = Layers(outputs)
    run = torch.compile(model, backend="remat", options=options, **more)
    for rows in SIZES:
        model.rows.zero_()
        expected = results(model, model, make, rows)
        model.rows.zero_()
        actual = results(model, run, make, rows)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


OPTIONS = [
    {"budget": "100%", "inductor": False},
    pytest.param({"budget": "min", "inductor": False, "time_limit": 2.0}, marks=pytest.mark.slow),
    pytest.param({"budget": "100%"}, marks=[pytest.mark.slow, needs_compiler]),
]
BY_OPTIONS = pytest.mark.parametrize("options", OPTIONS, ids=["100%", "min", "Inductor"])


QUICK = {
    "a size", "views", "a dataclass", "an empty tensor", "a buffer", "across a graph break",
    "an int", "a float", "None", "a dict of tensors", "an int across a graph break",
}  # fmt: skip
"""Cases that differ in kind."""


def with_marks(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.quick_cases("a dataclass-100%")
@BY_OPTIONS
@pytest.mark.parametrize("name", with_marks(OUTPUTS))
def test_outputs_of_every_kind(name: str, options: dict[str, Any]) -> None:
    check(OUTPUTS[name], lambda _: (), options)


@pytest.mark.quick_cases("None-100%")
@BY_OPTIONS
@pytest.mark.parametrize("name", with_marks(INPUTS))
def test_inputs_of_every_kind(name: str, options: dict[str, Any]) -> None:
    case = INPUTS[name]
    check(case.outputs, case.make, options)


@pytest.mark.slow_cases("views")
@pytest.mark.parametrize(
    "name", ["a size first", pytest.param("across a graph break", marks=pytest.mark.slow), "views"]
)
def test_sizes_that_are_dynamic_from_the_first_call(name: str) -> None:
    check(OUTPUTS[name], lambda _: (), {"budget": "100%", "inductor": False}, dynamic=True)


def test_the_hint_about_other_outputs_of_dynamic_sizes() -> None:
    """The error for a budget that is too small names the bytes of the other outputs."""
    model = Layers(OUTPUTS["a loss and logits"])
    options = {"budget": 1, "inductor": False, "split": "off"}
    run = torch.compile(model, backend="remat", options=options, dynamic=True)
    with pytest.raises(Exception, match=r'outputs="loss".*: 192 B of other outputs'):
        run(torch.randn(6, WIDTH))
