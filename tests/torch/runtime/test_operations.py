"""Operations that are hard to recompute, each in its own module: recomputed at random, the step
equals eager mode's bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import Case
from tests.helpers.training.random_modules import lean_schedule
from tests.helpers.training.recorded_steps import assert_same, run_step
from torch import nn

import remat

Forward = Callable[..., torch.Tensor]


class Plain(nn.Module):
    """A module whose forward is a function of it and its inputs."""

    def __init__(self, forward: Forward, **parts: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            self.add_module(name, part)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, *args: Any) -> torch.Tensor:
        return self._forward(self, *args)


def linear(forward: Forward) -> Plain:
    return Plain(forward, layer=nn.Linear(8, 8))


def writes_by_index(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    h[:, :2] = 0
    h[1] += 3
    h.mul_(2)
    return h.clone().masked_fill_(x > 0, 1.0).square().mean()


def writes_its_input(m: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(1)
    return (m.layer(x) * total).square().mean()


def writes_a_buffer_after_use(m: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (m.layer(x) * m.scale.clone()).square().mean()
    m.scale.add_(1)
    return loss


def half_without_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = m.layer(x) + 1
    return (m.layer(x) * target).mean()


class Doubled(torch.autograd.Function):
    """A function with its own backward, which is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0].exp() * 2


def losses(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    return (
        F.cross_entropy(h, y, label_smoothing=0.1, ignore_index=2)
        + F.binary_cross_entropy_with_logits(h, x.sigmoid())
        + F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction="batchmean")
    )


def regressions(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    errors = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
    return torch.stack([error(h, x) for error in errors]).sum() + h.std() + h.var() + h.norm()


def sorts(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    return h.sort(-1)[0][:, :3].sum() + h.topk(2)[0].sum() + h.max(1)[0].sum() + h.std()


def noises(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.dropout1d(m.layer(x)[None], 0.3)
    h = F.rrelu(F.alpha_dropout(h, 0.3, True), training=True)
    return h.square().mean() + (torch.rand_like(x) * h).sum() + (torch.randn(8) * h).mean()


def images(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.max_pool2d(m.conv(x), 2)
    return F.interpolate(m.up(h), scale_factor=2.0).square().mean()


ROWS = torch.randn(4, 8)
IMAGE = torch.randn(2, 3, 12, 12)
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "lstm": lambda: (
        Plain(lambda m, x: m.rnn(x)[0].square().mean(), rnn=nn.LSTM(8, 8, 2)),
        (torch.randn(5, 3, 8),),
    ),
    "gru": lambda: (
        Plain(lambda m, x: m.rnn(x)[0].square().mean(), rnn=nn.GRU(8, 8)),
        (torch.randn(5, 3, 8),),
    ),
    "attention": lambda: (
        Plain(
            lambda m, x: m.attention(x, x, x)[0].square().mean(),
            attention=nn.MultiheadAttention(8, 2, dropout=0.1),
        ),
        (torch.randn(5, 3, 8),),
    ),
    "fused-attention": lambda: (
        linear(
            lambda m, x: F.scaled_dot_product_attention(m.layer(x), x, x, is_causal=True).mean()
        ),
        (torch.randn(2, 2, 16, 8),),
    ),
    "images": lambda: (
        Plain(images, conv=nn.Conv2d(3, 4, 3), up=nn.ConvTranspose2d(4, 3, 3)),
        (IMAGE,),
    ),
    "channels-last": lambda: (
        Plain(
            lambda m, x: m.body(x).square().mean(),
            body=nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True)),
        ).to(memory_format=torch.channels_last),
        (IMAGE.to(memory_format=torch.channels_last),),
    ),
    "norms": lambda: (
        Plain(
            lambda m, x: m.group(x).square().mean() + m.instance(x).abs().mean(),
            group=nn.GroupNorm(1, 3),
            instance=nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        ),
        (IMAGE,),
    ),
    "embedding": lambda: (
        Plain(
            lambda m, i: (m.table(i).cumsum(1) * m.table.weight[3]).square().mean(),
            table=nn.Embedding(10, 8, padding_idx=0),
        ),
        (torch.randint(0, 10, (4, 5)),),
    ),
    "weight-norm": lambda: (
        Plain(
            lambda m, x: m.layer(x).square().mean(),
            layer=nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        ),
        (ROWS,),
    ),
    "spectral-norm": lambda: (
        Plain(
            lambda m, x: m.layer(x).square().mean(),
            layer=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        ),
        (ROWS,),
    ),
    "index-writes": lambda: (linear(writes_by_index), (ROWS,)),
    "input-writes": lambda: (linear(writes_its_input), (ROWS, torch.randn(4, 8))),
    "buffer-writes": lambda: (linear(writes_a_buffer_after_use), (ROWS,)),
    "same-input-twice": lambda: (
        linear(lambda m, a, b: (m.layer(a) * b).square().mean()),
        (ROWS, ROWS),
    ),
    "gather": lambda: (
        linear(lambda m, x, i: m.layer(x)[i].square().mean() + m.layer(x)[:, ::2].sum()),
        (ROWS, torch.tensor([0, 2, 2])),
    ),
    "einsum": lambda: (
        linear(lambda m, x: torch.einsum("bi,bj->ij", m.layer(x), x).norm()),
        (ROWS,),
    ),
    "complex": lambda: (linear(lambda m, x: torch.fft.rfft(m.layer(x)).abs().sum()), (ROWS,)),
    "stack-unbind": lambda: (
        linear(
            lambda m, x: torch.stack([m.layer(x), x]).unbind(0)[0].chunk(2, 1)[1].square().mean()
        ),
        (ROWS,),
    ),
    "losses": lambda: (linear(losses), (ROWS, torch.tensor([1, 2, 0, 7]))),
    "regressions": lambda: (linear(regressions), (torch.randn(64, 8),)),
    "sorts": lambda: (linear(sorts), (ROWS,)),
    "noises": lambda: (linear(noises), (ROWS,)),
    "custom-function": lambda: (linear(lambda m, x: Doubled.apply(m.layer(x)).mean()), (ROWS,)),
    "detach": lambda: (linear(lambda m, x: (m.layer(x) * m.layer(x).detach()).mean()), (ROWS,)),
    "no-grad-inside": lambda: (linear(half_without_grad), (ROWS,)),
    "double": lambda: (
        linear(lambda m, x: m.layer(x).square().mean()).double(),
        (ROWS.double(),),
    ),
}


# Gradients that may differ in the last bits: eager mode computes gates in place in parts of a
# tensor, and on CPUs with AVX2 the kernels for strided and contiguous memory round differently.
ROUNDED = {"gru"}
# Kernels whose real results are larger than those of fake tensors (oneDNN's LSTM workspace, 56 KB
# here): only a measurement shows it. Some bytes of scratch remain, which no operation returns.
LARGER_THAN_TRACED = {"lstm", "index-writes"}
SCRATCH_BYTES = 128


@pytest.mark.parametrize("name", CASES)
def test_a_recomputed_operation_is_exact(name: str) -> None:
    torch.manual_seed(0)
    model, args = CASES[name]()
    costs = "cpu" if name in LARGER_THAN_TRACED else remat.Roofline("cpu")
    trace = remat.measure(remat.trace(model, args), costs)
    graph = trace.graph()

    def case_of(model: nn.Module) -> Case:
        return Case(model, copy.deepcopy(args), loss=lambda out: out)

    case = case_of(copy.deepcopy(model))
    eager = run_step(case.model, case)
    schedules = [remat.Schedule.keep_all(graph)]
    schedules += [
        lean_schedule(graph, random.Random(n), retained_share)
        for n, retained_share in enumerate((0.5, 0.0))
    ]
    for schedule in schedules:
        copied_case = case_of(copy.deepcopy(model))
        program = remat.rewrite(trace, schedule)
        step = run_step(remat.lower(program, copied_case.model), copied_case)
        slack = SCRATCH_BYTES if name in LARGER_THAN_TRACED else 0
        assert step.peak_bytes <= program.predicted_peak_bytes + slack
        assert step.peak_bytes >= 0.99 * program.predicted_peak_bytes
        assert_same(step, eager, tolerance=1e-5 if name in ROUNDED else 0.0)
        for mine, expected in zip(copied_case.args, case.args, strict=True):
            assert torch.equal(mine, expected), "an input was written differently"
