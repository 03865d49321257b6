"""`remat.estimate`: what it says before a step runs is what the step takes when it runs."""

from __future__ import annotations

import pytest
import torch
from tests.harness import run_step
from tests.models import FAMILIES, PLAIN, Case, Mlp, Tied, gpt2
from torch import nn

import remat
from remat.costs.pricing import by_roofline
from remat.frontend.api.estimate import data_sheet


def _estimate(case: Case) -> remat.Estimate:
    return remat.estimate(case.model, case.args, case.kwargs)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow), "resnet"])
def test_eager_mode_takes_what_was_estimated(family: str) -> None:
    torch.manual_seed(0)
    case = FAMILIES[family]()
    found = _estimate(case)
    step = run_step(case.model, case)
    assert step.peak_bytes == pytest.approx(found.peak_bytes, rel=0.03)
    gradients = [g for g in step.gradients.values() if g is not None]
    assert found.all_gradient_bytes == sum(g.numel() * 4 for g in gradients)
    assert found.adam_bytes == 2 * found.all_gradient_bytes
    assert found.reachable_bytes < found.baseline_peak_bytes <= found.peak_bytes
    _check_parts(found)


def _check_parts(found: remat.Estimate) -> None:
    parts = (
        found.parameter_bytes,
        found.buffer_bytes,
        found.input_bytes,
        found.library_bytes,
        found.gradient_bytes,
        found.output_bytes,
        found.activation_bytes,
        found.passing_bytes,
    )
    assert sum(parts) == found.peak_bytes
    assert min(parts) >= 0
    assert sum(holder.size_bytes for holder in found.holders) == found.activation_bytes


@pytest.mark.parametrize("name", ["mlp-input-grad", "norms", "two-heads", "alias", "weights"])
def test_the_parts_add_up(name: str) -> None:
    _check_parts(_estimate(PLAIN[name]()))


def test_the_parts_by_hand() -> None:
    """x -> relu(linear(x)) -> sum, width 100, batch 1000."""
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU())

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).sum()

    found = remat.estimate(Step(), torch.zeros(1000, 100))
    assert found.parameter_bytes == found.all_gradient_bytes == 4 * (100 * 100 + 100)
    assert found.input_bytes == found.largest_value_bytes == 4 * 1000 * 100
    assert found.buffer_bytes == found.library_bytes == 0
    assert found.output_bytes == 4
    # The output of relu, and the linear layer's output forward or relu's gradient backward.
    assert found.activation_bytes + found.passing_bytes == pytest.approx(2 * 400_000, abs=100)
    case = Case(Step(), (torch.zeros(1000, 100),), loss=lambda out: out)
    assert found.peak_bytes == run_step(case.model, case).peak_bytes


def test_masks_of_dropout_are_as_eager_mode_keeps_them() -> None:
    """0.5 MiB of activations with one dropout: 4 bytes an element of mask, where plans have 1."""
    with_dropout, without = _estimate(gpt2(layers=1)), _estimate(gpt2(layers=1, dropout=0.0))
    assert without.peak_bytes == without.baseline_peak_bytes
    wide = 4 * 64 * 64 + 4 * 2 * 64 * 64 + 2 * 4 * 64 * 64  # embedding, attention, two residuals
    assert with_dropout.peak_bytes - with_dropout.baseline_peak_bytes == 3 * wide
    assert "masks of dropout" in with_dropout.describe()
    assert "masks of dropout" not in without.describe()


def test_the_words_name_the_parts_and_the_modules() -> None:
    found = _estimate(gpt2(layers=1))
    text = str(found)
    for words in (
        "GPT2LMHeadModel on cpu; nothing was run",
        "(backward",
        "parameters",
        "Adam's moments",
        "or less by recomputation",
        "transformer.h.*.mlp.act",
        "workspaces",
    ):
        assert words in text
    assert "transformer.h.0.attn" in {holder.module for holder in found.holders}


def test_fits() -> None:
    found = _estimate(PLAIN["mlp"]())
    assert found.fits(found.peak_bytes)
    assert not found.fits(found.peak_bytes - 1)
    assert found.fits("1GiB")
    for budget in ("60%", "min", "auto", "lots"):
        with pytest.raises(remat.BudgetError):
            found.fits(budget)


def test_a_model_without_memory_is_estimated_as_the_real_one() -> None:
    with torch.device("meta"):
        shapes = gpt2(layers=1)
    assert _estimate(shapes) == _estimate(gpt2(layers=1))
    assert all(p.is_meta for p in shapes.model.parameters())
    assert all(b.is_meta for b in shapes.model.buffers())


def test_tied_weights_without_memory_count_once() -> None:
    with torch.device("meta"):
        model = Tied()
        x = torch.empty(64, 24)
    assert remat.estimate(model, x) == remat.estimate(Tied(), torch.zeros(64, 24))


def test_what_would_not_fit_this_machine() -> None:
    with torch.device("meta"):
        model = Mlp(width=1 << 17, depth=4)
        x = torch.empty(1 << 14, 1 << 17)
    found = remat.estimate(model, x)
    assert found.parameter_bytes > 4 * 4 * 2**34
    assert not found.fits("80GiB")


def test_a_model_that_cannot_be_captured_says_so() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y.sum() if y.sum() > 0 else y.mean()

    model = Branch().to("meta")
    with pytest.raises(remat.TraceError, match="depends on tensor values"):
        remat.estimate(model, torch.empty(2, 4, device="meta"))
    assert model.linear.weight.is_meta


def test_of_a_saved_trace() -> None:
    case = PLAIN["mlp"]()
    traced = remat.trace(case.model, case.args, case.kwargs)
    assert remat.Estimate.of(by_roofline(traced, data_sheet(traced))) == _estimate(case)
    assert data_sheet(traced).name == "cpu"
