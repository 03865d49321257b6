"""Outputs that the caller drops before the backward need no memory during it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.loss_and_logits import (
    LOGITS_BYTES,
    LossAndLogits,
    assert_equal,
    batch,
    gradients_of_step,
    loss_and_logits,
    measured_peak,
)

import remat
from remat.documents.targets import BOUNDARY_NAME
from remat.documents.trace import Trace
from remat.frontend.compile.registry import CompiledPlan

COSTS = remat.Roofline("cpu")


def test_a_plan_with_dropped_outputs_takes_less_and_computes_the_same() -> None:
    model = loss_and_logits()
    expected = gradients_of_step(copy.deepcopy(model))
    plans = {}
    for outputs in ("held", "dropped"):
        gm = remat.optimize(model, "min", (batch(),), costs=COSTS, outputs=outputs, split="off")
        assert_equal(gradients_of_step(gm), expected)
        plans[outputs] = gm.plan
        assert gm.program is not None
        assert gm.program.outputs_dropped == (outputs == "dropped")
    assert plans["held"].peak_bytes - plans["dropped"].peak_bytes >= 0.9 * LOGITS_BYTES
    assert measured_peak(model, gm) <= plans["dropped"].peak_bytes


@pytest.mark.slow
def test_dropped_outputs_exist_until_the_backward_starts() -> None:
    trace = remat.measure(remat.trace(loss_and_logits(), (batch(),), outputs="dropped"), COSTS)
    graph = trace.graph()
    assert graph.boundary is not None
    start = graph.operations[graph.boundary]
    assert start.name == BOUNDARY_NAME
    assert LOGITS_BYTES in {graph.values[v].size_bytes for v in start.inputs}
    assert not graph.results.intersection(start.inputs)
    assert Trace.from_json(trace.to_json()).graph() == graph
    model = loss_and_logits()
    eager_outputs = model(batch())  # a caller that holds them anyway can read them
    gm = remat.optimize(model, "min", (batch(),), costs=COSTS, outputs="dropped")
    planned_outputs = gm(batch())
    planned_outputs["loss"].backward()
    assert torch.equal(planned_outputs["logits"], eager_outputs["logits"])


@pytest.mark.slow
def test_dropping_outputs_that_are_counted_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    gm = remat.optimize(loss_and_logits(), "92%", (batch(),), costs=COSTS)

    def warnings_logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if 'outputs="dropped"' in r.getMessage()]

    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(4):
            outputs = gm(batch())
            outputs["loss"].backward()
        gradients_of_step(gm)
        gradients_of_step(gm)
        assert warnings_logged() == []
        for _ in range(4):
            gradients_of_step(gm)
    (message,) = warnings_logged()
    assert "1.37 MiB" in message


@pytest.mark.slow
def test_nothing_is_logged_where_dropping_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    all_of_it = remat.optimize(loss_and_logits(), "100%", (batch(),), costs=COSTS)
    planned_so = remat.optimize(
        loss_and_logits(), "92%", (batch(),), costs=COSTS, outputs="dropped"
    )
    with caplog.at_level(logging.WARNING, logger="remat"):
        for _ in range(4):
            gradients_of_step(all_of_it)
            gradients_of_step(planned_so)
    assert 'outputs="dropped"' not in caplog.text


@pytest.mark.parametrize(
    "call",
    [remat.optimize, remat.enable, lambda m, _, **o: remat.trace(m, (batch(),), **o)],
)
def test_an_unknown_value_of_outputs_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"outputs is 'droped'; near are dropped; they are 'held'"):
        call(loss_and_logits(), "60%", outputs="droped")


@pytest.mark.slow
@needs_compiler
def test_dropped_outputs_work_under_torch_compile() -> None:
    model = loss_and_logits()
    expected = gradients_of_step(copy.deepcopy(model))
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


@pytest.mark.slow
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
