"""Outputs that the caller drops before the backward need no memory during it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from torch import nn

import remat
from remat.documents.targets import BOUNDARY_NAME
from remat.documents.trace import Trace
from remat.frontend.compile.registry import CompiledPlan
from remat.frontend.memory.allocator_peak import allocated_peak

WORDS = 700
COSTS = remat.Roofline("cpu")


class LossAndLogits(nn.Module):
    """A model whose largest tensor is an output next to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits}


def batch() -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 64), generator=torch.Generator().manual_seed(0))


LOGITS_BYTES = batch().numel() * WORDS * 4


def speaker() -> LossAndLogits:
    torch.manual_seed(0)
    return LossAndLogits()


def step(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(batch())["loss"].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def measured_peak(model: nn.Module, run: Any) -> int:
    """Return the peak by the allocator of a warm step that keeps only the loss."""
    step(model)
    model.zero_grad(set_to_none=True)
    ids = batch()
    peak = allocated_peak(lambda: run(ids)["loss"].backward())
    return peak + ids.nbytes + sum(p.nbytes for p in model.parameters())


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_plan_with_dropped_outputs_takes_less_and_computes_the_same() -> None:
    model = speaker()
    expected = step(copy.deepcopy(model))
    plans = {}
    for outputs in ("held", "dropped"):
        gm = remat.optimize(model, "min", (batch(),), costs=COSTS, outputs=outputs, split="off")
        assert_equal(step(gm), expected)
        plans[outputs] = gm.plan
        assert gm.program is not None
        assert gm.program.outputs_dropped == (outputs == "dropped")
    assert plans["held"].peak_bytes - plans["dropped"].peak_bytes >= 0.9 * LOGITS_BYTES
    assert measured_peak(model, gm) <= plans["dropped"].peak_bytes


def test_dropped_outputs_exist_until_the_backward_starts() -> None:
    trace = remat.measure(remat.trace(speaker(), (batch(),), outputs="dropped"), COSTS)
    graph = trace.graph()
    assert graph.boundary is not None
    start = graph.operations[graph.boundary]
    assert start.name == BOUNDARY_NAME
    assert LOGITS_BYTES in {graph.values[v].size_bytes for v in start.inputs}
    assert not graph.results.intersection(start.inputs)
    assert Trace.from_json(trace.to_json()).graph() == graph
    model = speaker()
    eager_outputs = model(batch())  # a caller that holds them anyway can read them
    gm = remat.optimize(model, "min", (batch(),), costs=COSTS, outputs="dropped")
    planned_outputs = gm(batch())
    planned_outputs["loss"].backward()
    assert torch.equal(planned_outputs["logits"], eager_outputs["logits"])


def test_dropping_outputs_that_are_counted_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    gm = remat.optimize(speaker(), "92%", (batch(),), costs=COSTS)

    def warnings_logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if 'outputs="dropped"' in r.getMessage()]

    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(4):
            outputs = gm(batch())
            outputs["loss"].backward()
        step(gm)
        step(gm)
        assert warnings_logged() == []
        for _ in range(4):
            step(gm)
    (message,) = warnings_logged()
    assert "1.37 MiB" in message


def test_nothing_is_logged_where_dropping_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    all_of_it = remat.optimize(speaker(), "100%", (batch(),), costs=COSTS)
    planned_so = remat.optimize(speaker(), "92%", (batch(),), costs=COSTS, outputs="dropped")
    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(4):
            step(all_of_it)
            step(planned_so)
    assert 'outputs="dropped"' not in caplog.text


@pytest.mark.parametrize(
    "call",
    [remat.optimize, remat.enable, lambda m, _, **o: remat.trace(m, (batch(),), **o)],
)
def test_an_unknown_value_of_outputs_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"outputs is 'droped'; near are dropped; they are 'held'"):
        call(speaker(), "60%", outputs="droped")


@needs_compiler
def test_dropped_outputs_work_under_torch_compile() -> None:
    model = speaker()
    expected = step(copy.deepcopy(model))
    torch._dynamo.reset()
    before = len(remat.compiled_plans())
    run = remat.compile(model, "min", outputs="dropped", time_limit=4.0)
    run(batch())["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    (plan,) = remat.compiled_plans()[before:]
    assert plan.verified_bytes is not None
    assert measured_peak(model, run) <= plan.verified_bytes


class LossAndScaledLogits(LossAndLogits):
    """A model with a large output that its backward does not read."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(ids)
        return {"loss": outputs["loss"], "logits": 2 * outputs["logits"]}


@needs_compiler
def test_dropped_outputs_lower_the_peak_of_plain_torch_compile() -> None:
    plans: list[CompiledPlan] = []
    for outputs in ("dropped", "held"):
        torch._dynamo.reset()
        run = remat.compile(LossAndScaledLogits(), "min", outputs=outputs, time_limit=4.0)
        run(batch())["loss"].backward()
        plans.append(remat.compiled_plans()[-1])
    without_outputs, with_outputs = plans
    assert without_outputs.baseline_bytes <= with_outputs.baseline_bytes - 0.9 * LOGITS_BYTES
