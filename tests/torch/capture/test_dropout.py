"""Dropout and random masks equal eager mode's, for every dtype, rate and layout."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import Case
from tests.helpers.training.recorded_steps import assert_eager_when_recomputed
from torch import nn

import remat
from remat.documents.arguments import Ref

# For these, `native_dropout` rounds 1 / (1 - p) in float32 differently from eager mode.
ROUNDED = (0.04, 0.09, 0.15, 0.42)


class Net(nn.Module):
    """A linear layer on (4, 8, 16), then `forward`; it contains the loss."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(16, 24), nn.Parameter(torch.randn(24, 1))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self._forward(self.layer(x)) * 2).square().mean() + self.weight.sum()


def case_of(forward: Callable[[torch.Tensor], torch.Tensor], **to: Any) -> Case:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16)
    return Case(Net(forward).to(**to), (x.to(**to),), loss=lambda out: out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 1 / 3, *ROUNDED, 0.97, 1.0, 0.0])
def test_dropout_of_any_rate_is_eager_modes(p: float, dtype: torch.dtype) -> None:
    assert_eager_when_recomputed(case_of(lambda h: F.dropout(torch.tanh(h), p) + h, dtype=dtype))


def transposed(h: torch.Tensor) -> torch.Tensor:
    return h.transpose(1, 2)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned before": lambda h: F.dropout(transposed(h), 0.3),
    "turned after": lambda h: transposed(F.dropout(h, 0.3)) * torch.ones(24, 8),
    "turned, then as rows": lambda h: F.dropout(transposed(h), 0.3).reshape(-1, 8),
    "every second": lambda h: F.dropout(h[:, :, ::2], 0.3).exp(),
    "expanded": lambda h: F.dropout(h.mean(2, keepdim=True).expand(-1, -1, 5), 0.3),
    "its gradient is expanded": lambda h: F.dropout(transposed(h), 0.3).sum(1),
    "channels last": lambda h: F.dropout(
        h.reshape(4, 8, 6, 4).to(memory_format=torch.channels_last), 0.3
    ),
    "in place": lambda h: F.dropout(h * 3, 0.3, inplace=True),
    "in place, turned": lambda h: F.dropout(transposed(h * 3), 0.3, inplace=True),
    "coins": lambda h: transposed(h) * torch.empty_like(transposed(h)).bernoulli_(0.3),
    "alpha": lambda h: F.alpha_dropout(transposed(h), 0.3, training=True),
    "feature": lambda h: F.dropout1d(transposed(h), 0.3),
    "nothing": lambda h: F.dropout(h[:0], 0.3).sum() + torch.tanh(h),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.15),
    "transformed": lambda h: (
        h * torch.func.grad(lambda y: F.dropout(y, 0.15).exp().sum())(h.detach())
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_of_any_layout_is_eager_modes(name: str) -> None:
    """The mask is sampled in memory order, and the gradient has the layout of eager mode's."""
    assert_eager_when_recomputed(case_of(LAYOUTS[name]))


def test_dropout_in_place_on_part_of_a_tensor_is_eager_modes() -> None:
    def forward(h: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 4, 48).transpose(0, 1)
        mask[:, :, ::2].bernoulli_(0.4)
        return h * mask[:, :, :24]

    assert_eager_when_recomputed(case_of(forward))


def test_the_mask_takes_one_byte_per_element_and_is_a_separate_operation() -> None:
    """So the output of dropout can be recomputed from the mask, without sampling."""
    trace = remat.trace(*traced_args(case_of(lambda h: F.dropout(torch.tanh(h), 0.1))))
    results = {r.name: r.tensor for node in trace.nodes for r in node.results}
    seeded_nodes = [node for node in trace.nodes if node.random]
    scaled = [node for node in trace.nodes if "dropout" in node.target]
    assert [node.target for node in seeded_nodes] == ["aten.bernoulli.p"]
    assert results[seeded_nodes[0].results[0].name].dtype == "bool"
    assert [node.backward for node in scaled] == [False, True]
    assert {node.args[1] for node in scaled} == {Ref(seeded_nodes[0].results[0].name)}
    assert not any(node.view for node in trace.nodes if "permute" in node.target)


def traced_args(case: Case) -> tuple[nn.Module, tuple[Any, ...]]:
    return case.model, case.args


def test_concurrent_captures_wait_for_each_other() -> None:
    """They change torch in all threads."""
    first_entered, second_entered = threading.Event(), threading.Event()

    def first(h: torch.Tensor) -> torch.Tensor:
        first_entered.set()
        assert not second_entered.wait(0.2)
        return F.dropout(h, 0.1)

    def second(h: torch.Tensor) -> torch.Tensor:
        second_entered.set()
        return F.dropout(h, 0.1)

    traces: list[remat.Trace] = []
    waiting = case_of(second)

    def other() -> None:
        assert first_entered.wait(60)
        traces.append(remat.trace(*traced_args(waiting)))

    thread = threading.Thread(target=other)
    thread.start()
    traces.append(remat.trace(*traced_args(case_of(first))))
    thread.join(60)
    assert len(traces) == 2
    assert traces[0].nodes == traces[1].nodes


@pytest.mark.gpu
def test_traces_for_cuda_have_native_dropout_as_eager_mode() -> None:
    case = case_of(lambda h: F.dropout(h, 0.15), device="cuda")
    targets = [node.target for node in remat.trace(*traced_args(case)).nodes]
    assert "aten.native_dropout.default" in targets
    assert "aten.native_dropout_backward.default" in targets


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["turned before", "in place, turned", "coins", "alpha"])
def test_dropout_on_cuda_samples_as_eager_mode(name: str) -> None:
    case = case_of(LAYOUTS[name], device="cuda")
    gm = remat.optimize(copy.deepcopy(case.model), "100%", case.args, costs=remat.Roofline("h200"))
    losses = []
    for model in (case.model, gm):
        torch.manual_seed(3)
        losses.append(model(*case.args))
        losses[-1].backward()
    assert torch.equal(*losses)
    for actual, expected in zip(gm.parameters(), case.model.parameters(), strict=True):
        assert torch.allclose(actual.grad, expected.grad)
