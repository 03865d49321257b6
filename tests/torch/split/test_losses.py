"""Losses as their users write them: none keeps a tensor as large as the logits, gradients equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.training.losses import LOSSES, SEQUENCES, TOKENS, WORDS, Policy, batch_of
from tests.helpers.training.recorded_steps import relative_error

import remat
from remat.documents.trace import Trace
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.passes.split.rules import RULES
from remat.passes.split.splits import split_largest_operations
from remat.schedule import Schedule

OPAQUE = {
    "aten.arange.default": "one number for each class",
    "aten.scalar_tensor.default": "one number",
    "aten.lift_fresh_copy.default": "one number",
    "aten.select_backward.default": "the gradient of one of the top two, which are small",
    "remat.write.default": "writes into a small tensor",
}
"""Operators of the losses without a rule, and why none is needed."""

_SHORTEST = (TOKENS - 1) / TOKENS
"""Shifted logits have one token less."""


def traced(name: str, dtype: torch.dtype) -> tuple[Policy, dict[str, torch.Tensor], Trace]:
    torch.manual_seed(0)
    model, batch = Policy(LOSSES[name], dtype), batch_of(dtype=dtype)
    trace = remat.trace(model, (), batch, outputs="loss")
    return model, batch, remat.measure(trace, remat.Roofline("cpu"))


def in_pieces(trace: Trace) -> Trace:
    for _ in range(4):
        split = split_largest_operations(trace, 16)
        if split is trace:
            break
        trace = remat.measure(split, remat.Roofline("cpu"))
    return trace


def as_large_as_logits(trace: Trace, item_bytes: int) -> list[str]:
    """Return the operators that produce a tensor as large as the (shifted) logits."""
    least_bytes = _SHORTEST * SEQUENCES * TOKENS * WORDS * item_bytes
    return [
        node.target
        for node in trace.nodes
        if not node.view
        for result in node.results
        if trace.storage_bytes[result.storage] >= least_bytes
    ]


def first_output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_pieces_is_the_same_without_whole_logits(name: str) -> None:
    model, batch, trace = traced(name, torch.float64)
    split = in_pieces(trace)
    assert as_large_as_logits(split, 8) == []
    program = remat.rewrite(split, Schedule.keep_all(split.graph()))
    planned = remat.lower(program, copy.deepcopy(model))
    expected, got = model(**batch), planned(**batch)
    first_output(expected).backward()
    first_output(got).backward()
    assert relative_error(first_output(expected), first_output(got)) < 1e-10
    for parameter, reference in zip(planned.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        assert relative_error(reference.grad, parameter.grad) < 1e-10


def trained(
    module: torch.nn.Module, model: Policy, batch: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of two accumulated steps of `module`, and the peak of the first in
    bytes. `module` has the parameters of `model`."""
    torch.manual_seed(3)
    resident_bytes = unique_bytes([*model.parameters(), *batch.values()])
    with LiveStorageMeter(resident_bytes) as meter:
        first_output(module(**batch)).backward()
    first_output(module(**batch)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None], meter.peak_bytes


_FAST = ("cross_entropy", "dpo")


@pytest.mark.parametrize(
    "name",
    [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES],
)
def test_the_smallest_peak_is_measured_to_the_byte(name: str) -> None:
    """With dropout and accumulated gradients. One loss has 4 bytes less than planned."""
    torch.manual_seed(0)
    eager, batch = Policy(LOSSES[name], dropout=0.2), batch_of()
    model = copy.deepcopy(eager)
    trace = remat.measure(remat.trace(model, (), batch, outputs="loss"), remat.Roofline("cpu"))
    step = remat.solve_step(trace, "min", split=16)
    planned = remat.lower(remat.rewrite(step.trace, step.plan.schedule), model)
    gradients, peak_bytes = trained(planned, model, batch)
    assert 0 <= step.plan.peak_bytes - peak_bytes <= (4 if name == "generalized_jsd" else 0)
    expected, eager_peak_bytes = trained(eager, eager, batch)
    assert peak_bytes < eager_peak_bytes
    for got, reference in zip(gradients, expected, strict=True):
        assert relative_error(reference, got) < 1e-6


def test_every_operator_of_the_losses_has_a_rule_or_a_reason() -> None:
    targets = {node.target for name in LOSSES for node in traced(name, torch.float32)[2].nodes}
    assert targets - RULES.keys() == OPAQUE.keys()
