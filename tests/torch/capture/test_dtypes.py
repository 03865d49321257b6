"""Lower precision and autocast, with dropout and recomputed: bit for bit as in eager mode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training.models import FAMILIES, PLAIN, Case, WithParts, gpt2
from tests.helpers.training.recorded_steps import assert_eager_when_recomputed
from torch import nn

import remat

MODES = ("float32", "bfloat16", "float16", "float64", "autocast")


def in_mode(case: Case, mode: str) -> Case:
    """Return the case in a dtype, or in float32 under autocast to bfloat16."""
    if mode == "autocast":
        case.autocast = torch.bfloat16
        return case
    dtype = getattr(torch, mode)

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    case.model.to(dtype)
    case.args = tuple(cast(value) for value in case.args)
    case.kwargs = {key: cast(value) for key, value in case.kwargs.items()}
    return case


# The losses of two are computed outside of the model, one has nothing to recompute, and one differs
# under autocast.
OTHERS = {"two-heads", "alias", "weights", "mlp-bf16"}
ALL = {name: make for name, make in (FAMILIES | PLAIN).items() if name not in OTHERS}
QUICK = ("mlp", "norms", "tied", "shared", "mlp-input-grad")
ROUNDED = {("unet", "float32"), ("unet", "float64")}
"""Cases in which one bias is summed in another order, so that its last bit differs."""


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if name in QUICK else pytest.mark.slow)
        for name, mode in itertools.product(ALL, MODES)
        if (name, mode) not in ROUNDED
    ],
)
def test_every_model_is_exact_in_lower_precision(name: str, mode: str) -> None:
    torch.manual_seed(0)
    assert_eager_when_recomputed(in_mode(ALL[name](), mode))


@pytest.mark.quick_cases("sdpa-0.0-autocast", "sdpa-0.1-autocast", "eager-0.0-autocast")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_exact_in_lower_precision(attention: str, dropout: float, mode: str) -> None:
    torch.manual_seed(0)
    case = gpt2(layers=1, dropout=dropout)
    case.model.set_attn_implementation(attention)  # type: ignore[operator]
    assert_eager_when_recomputed(in_mode(case, mode))


# -- autocast -------------------------------------------------------------------------------------


class Twice(WithParts, layer=(16, 16), weight=lambda: nn.Parameter(torch.randn(16, 16))):
    """A module that uses one layer twice, and one weight both cast and in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(torch.tanh(self.layer(x))) @ self.weight
        return (h @ self.weight).square().mean() + self.weight.square().mean()


class Tied(nn.Module):
    """The embedding is the head's weight: read in float32, and cast twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.down = nn.Linear(40, 16)
        self.head.weight = self.embedding.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.tanh(self.head(self.embedding(i))))
        return self.head(h).square().mean()


class Exact(WithParts, layer=(16, 16), exact=(16, 16)):
    """A part in float32 whose backward multiplies matrices, and a cast in the model itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(x))
        with torch.autocast("cpu", enabled=False):
            h = self.exact(torch.tanh(self.exact(h.float())))
        weight = self.exact.weight
        return (h.bfloat16() @ weight.bfloat16() @ weight.bfloat16()).square().mean()


class Within(nn.Module):
    """A module that enters autocast twice: the second context casts again what the first had
    cached."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(16, 16)
        self.inner = nn.Sequential(layer, nn.Tanh(), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = self.inner(x)
        with torch.autocast("cpu", torch.bfloat16):
            return (first + self.inner(first)).square().mean()


class Norms(nn.Module):
    """Normalisations of bfloat16 with weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.norms = nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms(self.conv(x)).sigmoid().square().mean()


ROWS = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
AUTOCAST: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "twice": lambda: (Twice(), ROWS),
    "twice, and its input": lambda: (Twice(), ROWS.clone().requires_grad_()),
    "tied": lambda: (Tied(), torch.arange(32)),
    "exact": lambda: (Exact(), ROWS),
    "within": lambda: (Within(), ROWS),
    "norms": lambda: (Norms(), torch.randn(4, 4, 8, 8)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_exact_when_recomputed(name: str) -> None:
    torch.manual_seed(0)
    model, x = AUTOCAST[name]()
    inside = torch.bfloat16 if name != "within" else None
    case = Case(model, (x,), loss=lambda out: out, autocast=inside)
    trace = assert_eager_when_recomputed(case)
    priced = remat.measure(trace, "cpu", cache=False)
    assert priced.cost_source.startswith("measured cpu"), "of operands in their own dtypes"


def test_autocast_without_its_cache_is_exact() -> None:
    """Then every use casts, and the gradients are summed in float32."""
    torch.manual_seed(0)
    model = Twice()
    x = ROWS.clone()
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = eager(x)
        gm = remat.optimize(model, "100%", (x,), costs=remat.Roofline("cpu"))
        actual = gm(x)
    expected.backward()
    actual.backward()
    for mine, theirs in zip(gm.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_shared_weight_is_cast_once() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        trace = remat.trace(Twice(), ROWS)
    casts = [n for n in trace.nodes if n.target == "aten._to_copy.default" and not n.backward]
    weights = [p.name for p in trace.placeholders if p.kind == "parameter"]
    read = [argument.name for node in casts for argument in node.args]
    assert sorted(name for name in read if name in weights) == sorted(weights)
