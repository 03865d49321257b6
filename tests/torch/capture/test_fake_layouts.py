"""Kernels whose results have another layout than fake tensors predict are captured as they run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import Case
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from torch import nn
from torch._subclasses import FakeTensorMode

import remat
from remat.frontend.capture.eager_kernels.fake_results import (
    KERNEL_LAYOUTS,
    fakes_with_kernel_layouts,
)

Kernel = Callable[[torch.Tensor, torch.Tensor], Any]
aten = torch.ops.aten

CALLS: dict[Any, Kernel] = {
    aten.softplus_backward.default: lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
    aten.elu_backward.default: lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    aten.hardsigmoid_backward.default: aten.hardsigmoid_backward,
    aten.hardswish_backward.default: aten.hardswish_backward,
    aten.hardtanh_backward.default: lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0),
    aten.native_dropout_backward.default: lambda g, x: aten.native_dropout_backward(g, x > 0, 2.0),
    aten.binary_cross_entropy_backward.default: lambda g, x: aten.binary_cross_entropy_backward(
        g, x.sigmoid(), x.sigmoid()
    ),
    aten._log_softmax_backward_data.default: lambda g, x: aten._log_softmax_backward_data(
        g, x, -1, torch.float32
    ),
    aten.huber_loss_backward.default: lambda g, x: aten.huber_loss_backward(g, x, x, 0, 1.0),
    aten.mse_loss_backward.default: lambda g, x: aten.mse_loss_backward(g, x, x, 0),
    aten.smooth_l1_loss_backward.default: lambda g, x: aten.smooth_l1_loss_backward(
        g, x, x, 0, 1.0
    ),
    aten.native_layer_norm_backward.default: lambda g, x: aten.native_layer_norm_backward(
        g, x, [3], x.mean(-1, True), x.std(-1, keepdim=True), None, None, [True, False, False]
    )[0],
    aten.native_batch_norm.default: lambda g, x: aten.native_batch_norm(
        x, None, None, None, None, True, 0.1, 1e-5
    )[0],
    aten._native_batch_norm_legit.default: lambda g, x: aten._native_batch_norm_legit(
        x, None, None, torch.zeros(5), torch.ones(5), True, 0.1, 1e-5
    )[0],
    aten._native_batch_norm_legit.no_stats: lambda g, x: aten._native_batch_norm_legit.no_stats(
        x, None, None, True, 0.1, 1e-5
    )[0],
    aten._native_batch_norm_legit_functional.default: (
        lambda g, x: aten._native_batch_norm_legit_functional(
            x, None, None, torch.zeros(5), torch.ones(5), True, 0.1, 1e-5
        )[0]
    ),
    aten.native_batch_norm_backward.default: lambda g, x: aten.native_batch_norm_backward(
        g, x, None, None, None, torch.zeros(5), torch.ones(5), True, 1e-5, [True, False, False]
    )[0],
}


def in_all_layouts() -> list[torch.Tensor]:
    """Return tensors of the same sizes in all layouts, among them one expanded element."""
    orders = itertools.permutations(range(3))
    sizes = (2, 5, 3)
    dense = [
        torch.randn([sizes[i] for i in order]).permute([order.index(i) for i in range(3)])
        for order in orders
    ]
    return [*dense, torch.ones(()).expand(sizes)]


@pytest.mark.parametrize("operator", KERNEL_LAYOUTS, ids=str)
def test_fake_tensors_have_the_layout_of_the_kernels_results(operator: Any) -> None:
    call = CALLS[operator]
    with fakes_with_kernel_layouts():
        for gradient, x in itertools.product(in_all_layouts(), in_all_layouts()[:-1]):
            made = call(gradient, x)
            with FakeTensorMode() as mode:
                fake = call(mode.from_tensor(gradient), mode.from_tensor(x))
            assert (fake.shape, fake.stride()) == (made.shape, made.stride())


class Transposed(nn.Module):
    """A module in which the gradient of an activation has another layout than the activation."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.function(self.before(x)).transpose(1, 2)).square().mean()


@pytest.mark.parametrize("function", [F.softplus, F.elu, F.hardtanh, F.hardswish, F.hardsigmoid])
def test_modules_with_unusual_layouts_train_as_eager_mode(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    case = Case(Transposed(function), (torch.randn(4, 8, 16),), loss=lambda out: out)
    eager = eager_step(case)
    gm = remat.optimize(copy.deepcopy(case.model), "100%", costs=remat.Roofline("cpu"))
    assert_same(run_step(gm, case), eager, tolerance=0.0)


@pytest.mark.parametrize("of", ["statistics", "batch"])
def test_batch_norm_of_a_transposed_input_trains_as_eager_mode(of: str) -> None:
    """As between layers over time: the CPU's kernels return dense results."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.norm = nn.BatchNorm1d(16, track_running_stats=of == "statistics")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            transposed = self.norm(self.first(x).transpose(1, 2))
            return self.last(transposed.transpose(1, 2).relu())

    torch.manual_seed(0)
    case = Case(Transposed(), (torch.randn(4, 12, 16),), loss=lambda out: out.square().mean())
    eager = eager_step(case)
    model = remat.optimize(case.model, "100%", case.args, costs=remat.Roofline("cpu"))
    assert_same(run_step(model, case), eager, tolerance=0.0)


class Scatters(nn.Module):
    """Writes into a copy of a view, whose kernel copies all that the view shows a part of."""

    def __init__(self, scatter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(8, 8)
        self.scatter = scatter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scatter(self.first(x)[:, :8])).square().mean()


@pytest.mark.parametrize(
    "scatter",
    [
        lambda x: torch.slice_scatter(x, torch.zeros(64, 2), 1, 2, 4),
        lambda x: torch.select_scatter(x, torch.zeros(64), 1, 2),
        lambda x: torch.diagonal_scatter(x, torch.zeros(8)),
        lambda x: torch.diagonal_scatter(x[:1].expand(8, 8), torch.zeros(8)),
    ],
)
def test_copies_of_whole_storages_are_predicted(
    scatter: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    case = Case(Scatters(scatter), (torch.randn(64, 16),), loss=lambda loss: loss)
    eager = eager_step(case)
    model = remat.optimize(case.model, "100%", case.args, costs=remat.Roofline("cpu"))
    step = run_step(model, case)
    assert_same(step, eager, tolerance=0.0)
    assert model.plan is not None
    assert 0 <= model.plan.peak_bytes - step.peak_bytes <= 4


class Weighted(nn.Module):
    """One function of an input and a parameter."""

    def __init__(self, weight: torch.Tensor, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight).relu().sum()


WEIGHTS: dict[str, tuple[torch.Tensor, Callable[..., torch.Tensor], tuple[int, ...], int]] = {
    "transposed": (torch.randn(256, 128).t(), torch.matmul, (2, 128), 0),
    "channels_last_3d": (
        torch.randn(8, 8, 3, 3, 3).to(memory_format=torch.channels_last_3d),
        F.conv3d, (2, 8, 4, 4, 4), 0,
    ),
    "channels_last": (
        torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last), F.conv2d, (2, 8, 9, 9), 0,
    ),
    "gradient of another layout": (
        torch.randn(256, 128).t(), lambda x, w: x * w.reshape(-1), (256 * 128,), 1,
    ),
    "permuted": (
        torch.randn(16, 32, 64).permute(1, 2, 0), lambda x, w: x * w.reshape(-1), (32 * 1024,), 1,
    ),
    "with gaps": (torch.randn(256, 128)[:, :64], lambda x, w: x @ w.t(), (2, 64), 1),
}  # fmt: skip
"""A parameter, the function of an input and it, the input's shape, and the number of copies of the
gradient."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_have_the_layout_that_autograd_takes_over(name: str) -> None:
    """A gradient that autograd copies once more is in memory twice."""
    weight, function, shape, copies = WEIGHTS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    if name == "channels_last_3d":
        x = x.to(memory_format=torch.channels_last_3d)
    case = Case(Weighted(weight, function), (x,), loss=lambda out: out)
    eager = eager_step(case)
    gm = remat.optimize(copy.deepcopy(case.model), "100%", case.args, costs=remat.Roofline("cpu"))
    step = run_step(gm, case)
    assert_same(step, eager)
    assert gm.plan is not None
    assert step.peak_bytes <= gm.plan.peak_bytes
    trace = remat.trace(case.model, case.args)
    clones = [n.name for n in trace.nodes if n.backward and n.target == "aten.clone.default"]
    assert len(clones) == copies
    gradient, parameter = next(iter(gm.parameters())).grad, weight
    assert gradient is not None
    is_dense = name != "with gaps"
    assert gradient.stride() == (parameter.stride() if is_dense else (64, 1))
