"""`remat.estimate` predicts, before a step runs, what the step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.training.models import FAMILIES, PLAIN, Case, Mlp, Tied, WithParts, gpt2
from tests.helpers.training.recorded_steps import run_step
from torch import nn

import remat
from remat.costs.trace_costs import with_roofline_costs
from remat.frontend.api.estimate import roofline_for_trace
from remat.frontend.memory.meter import allocated_peak
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.report.estimate import Estimate


def _estimate(case: Case) -> Estimate:
    return remat.estimate(case.model, case.args, case.kwargs)


def _estimated_and_allocated(model: nn.Module, x: torch.Tensor) -> tuple[Estimate, int]:
    """Return the estimate, and the peak by torch's allocator: autograd adds gradients in place only
    if no meter intercepts its operations."""
    estimate = remat.estimate(model, x)
    allocated_bytes = allocated_peak(lambda: model(x).backward())
    constant_bytes = estimate.parameter_bytes + estimate.buffer_bytes + estimate.input_bytes
    return estimate, allocated_bytes + constant_bytes


@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow), "resnet"])
def test_eager_mode_has_the_estimated_peak(family: str) -> None:
    torch.manual_seed(0)
    case = FAMILIES[family]()
    estimate = _estimate(case)
    step = run_step(case.model, case)
    assert step.peak_bytes == pytest.approx(estimate.peak_bytes, rel=0.03)
    gradients = [g for g in step.gradients.values() if g is not None]
    assert estimate.all_gradient_bytes == sum(g.numel() * 4 for g in gradients)
    assert estimate.adam_bytes == 2 * estimate.all_gradient_bytes
    assert estimate.reachable_peak_bytes < estimate.baseline_peak_bytes <= estimate.peak_bytes
    _check_parts(estimate)


def _check_parts(estimate: Estimate) -> None:
    parts = (
        estimate.parameter_bytes,
        estimate.buffer_bytes,
        estimate.input_bytes,
        estimate.library_bytes,
        estimate.gradient_bytes,
        estimate.output_bytes,
        estimate.activation_bytes,
        estimate.activation_gradient_bytes,
    )
    assert sum(parts) == estimate.peak_bytes
    assert min(parts) >= 0
    assert (
        sum(holder.size_bytes for holder in estimate.activations_by_module)
        == estimate.activation_bytes
    )


@pytest.mark.parametrize("name", ["mlp-input-grad", "norms", "two-heads", "alias", "weights"])
def test_the_parts_of_an_estimate_add_up(name: str) -> None:
    _check_parts(_estimate(PLAIN[name]()))


@pytest.mark.parametrize("name", ["mlp-input-grad", "norms", "weights"])
def test_the_parts_of_a_step_that_accumulates_gradients_add_up(name: str) -> None:
    case = PLAIN[name]()
    trace = with_gradient_accumulation(remat.trace(case.model, case.args, case.kwargs))
    assert trace.accumulates_gradients
    _check_parts(Estimate.of(remat.measure(trace, remat.Roofline("cpu"))))


def test_a_step_without_operations_has_an_estimate() -> None:
    """Such as one whose tensors all are in constant memory."""
    traced = remat.trace(nn.Linear(4, 4), torch.randn(2, 4))
    empty = traced.replace(
        nodes=(),
        outputs=(),
        gradients=(),
        result=traced.result.without_leaves({0}),
        placeholders=tuple(p for p in traced.placeholders if p.kind != "tangent"),
    )
    assert not empty.graph().values
    estimate = Estimate.of(empty)
    _check_parts(estimate)
    assert "largest   0 B, no value" in estimate.describe()


def test_the_parts_are_those_counted_by_hand() -> None:
    """x -> relu(linear(x)) -> sum, width 100, batch 1000."""
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU())

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).sum()

    estimate = remat.estimate(Step(), torch.zeros(1000, 100))
    assert estimate.parameter_bytes == estimate.all_gradient_bytes == 4 * (100 * 100 + 100)
    assert estimate.input_bytes == estimate.largest_value_bytes == 4 * 1000 * 100
    assert estimate.buffer_bytes == estimate.library_bytes == 0
    assert estimate.output_bytes == 4
    # The output of relu, and the linear layer's output forward or relu's gradient backward.
    assert estimate.activation_bytes + estimate.activation_gradient_bytes == pytest.approx(
        2 * 400_000, abs=100
    )
    case = Case(Step(), (torch.zeros(1000, 100),), loss=lambda out: out)
    assert estimate.peak_bytes == run_step(case.model, case).peak_bytes


def test_a_product_retains_both_factors_until_both_gradients_are_computed() -> None:
    """linear -> h * sigmoid(h) -> sum: while the product's backward computes the second gradient,
    h and the sigmoid, both gradients and the gradient of the product are live."""

    class Step(WithParts, linear=(64, 64), last=(64, 1)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            return self.last(hidden * torch.sigmoid(hidden)).sum()

    case = Case(Step(), (torch.zeros(1000, 64),), loss=lambda out: out)
    estimate, measured_bytes = _estimate(case), run_step(case.model, case).peak_bytes
    assert measured_bytes <= estimate.peak_bytes <= 1.005 * measured_bytes
    assert estimate.activation_bytes + estimate.activation_gradient_bytes >= 5 * 256_000


def test_a_product_of_two_dtypes_retains_its_factors_until_the_gradient_is_cast() -> None:
    """As the GELU of GPT-2 under autocast: the gradient of the factor in bfloat16 is computed in
    float32, and cast while both factors and the other gradient are live."""

    class Step(WithParts, linear=(64, 64), last=(64, 1)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            return self.last(hidden.bfloat16() * torch.sigmoid(hidden)).sum()

    case = Case(Step(), (torch.zeros(1000, 64),), loss=lambda out: out)
    assert _estimate(case).peak_bytes == run_step(case.model, case).peak_bytes


def test_gradients_of_a_tensor_with_many_uses_are_added_in_place() -> None:
    """Each slice's gradient has the size of `hidden`, as the sum of those before it has: no third
    tensor is live, as in a state-space model that reads one time step after the other."""

    class Step(WithParts, linear=(8, 64)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            state = torch.zeros(1000, 64)
            for time in range(10):
                state = 0.5 * state + hidden[time].sin()
            return state.sum()

    batch = torch.zeros(10, 1000, 8)
    estimate, measured_bytes = _estimated_and_allocated(Step(), batch)
    assert measured_bytes == pytest.approx(estimate.peak_bytes, rel=0.005)
    trace = remat.trace(Step(), batch)
    hidden_bytes = 10 * 1000 * 64 * 4
    without = remat.measure(trace, remat.Roofline("cpu")).replace(reuses_memory=False).graph()
    without_bytes = remat.simulate(without, remat.Schedule.keep_all(without)).peak_bytes
    assert without_bytes > estimate.peak_bytes + 0.8 * hidden_bytes
    assert estimate.baseline_peak_bytes == estimate.peak_bytes  # so does a plan
    _check_parts(estimate)


class SharedSum(WithParts, first=(8, 512), last=(512, 512), head=(512, 1)):
    """The gradient of the last sum is read once more after it was added to another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        early, late = hidden.tanh(), hidden.sigmoid()
        return self.head(early + (late + self.last(late))).sum()


def test_a_gradient_that_is_read_later_is_not_added_into() -> None:
    estimate, measured_bytes = _estimated_and_allocated(SharedSum(), torch.randn(2000, 8))
    assert measured_bytes == pytest.approx(estimate.peak_bytes, rel=0.005)
    _check_parts(estimate)


class TwoReaders(nn.Module):
    """Two layers without bias that read one hidden tensor, by far the largest of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 512)
        self.readers = nn.ModuleList(nn.Linear(512, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return torch.stack([reader(hidden).sin().sum() for reader in self.readers]).sum()


@pytest.mark.parametrize("shape", [(2000, 8), (4, 500, 8)], ids=["2-D", "3-D"])
def test_a_gradient_that_is_a_view_is_not_added_in_place(shape: tuple[int, ...]) -> None:
    """The gradient of a linear layer's 3-D input is a view of its product."""
    estimate, measured_bytes = _estimated_and_allocated(TwoReaders(), torch.randn(shape))
    assert measured_bytes == pytest.approx(estimate.peak_bytes, rel=0.005)


class SumOfProducts(torch.autograd.Function):
    """A function whose own backward adds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(weight)
        return x @ weight, x @ weight.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        first, second = gradients
        return first @ weight.T + second @ weight.cos().T, None


def test_a_sum_within_a_backward_formula_is_not_made_in_place() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(512, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = SumOfProducts.apply(x, self.weight)
            return first.sin().sum() + second.sin().sum()

    model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), Inner())
    estimate, measured_bytes = _estimated_and_allocated(model, torch.randn(2000, 8))
    assert estimate.peak_bytes >= 0.98 * measured_bytes


@pytest.mark.slow
def test_dropout_masks_have_the_size_that_eager_mode_saves() -> None:
    """4 bytes per element of the mask, where plans have 1."""
    case, without = gpt2(layers=1), gpt2(layers=1, dropout=0.0)
    with_dropout = _estimate(case)
    assert with_dropout.peak_bytes == run_step(case.model, case).peak_bytes
    assert _estimate(without).peak_bytes == run_step(without.model, without).peak_bytes
    assert with_dropout.peak_bytes > with_dropout.baseline_peak_bytes
    assert "its masks are smaller" in with_dropout.describe()


def test_the_description_names_the_parts_and_the_modules() -> None:
    estimate = _estimate(gpt2(layers=1))
    text = str(estimate)
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
    assert "transformer.h.0.attn" in {holder.module for holder in estimate.activations_by_module}


def test_fits_compares_the_estimate_with_a_budget() -> None:
    estimate = _estimate(PLAIN["mlp"]())
    assert estimate.fits(estimate.peak_bytes)
    assert not estimate.fits(estimate.peak_bytes - 1)
    assert estimate.fits("1GiB")
    for budget in ("60%", "min", "auto", "lots"):
        with pytest.raises(remat.BudgetError):
            estimate.fits(budget)


@pytest.mark.slow
def test_a_model_on_the_meta_device_has_the_estimate_of_the_real_one() -> None:
    with torch.device("meta"):
        shapes = gpt2(layers=1)
    assert _estimate(shapes) == _estimate(gpt2(layers=1))
    assert all(p.is_meta for p in shapes.model.parameters())
    assert all(b.is_meta for b in shapes.model.buffers())


def test_tied_weights_on_the_meta_device_count_once() -> None:
    with torch.device("meta"):
        model = Tied()
        x = torch.empty(64, 24)
    assert remat.estimate(model, x) == remat.estimate(Tied(), torch.zeros(64, 24))


def test_a_step_larger_than_this_machine_is_estimated() -> None:
    with torch.device("meta"):
        model = Mlp(width=1 << 17, depth=4)
        x = torch.empty(1 << 14, 1 << 17)
    estimate = remat.estimate(model, x)
    assert estimate.parameter_bytes > 4 * 4 * 2**34
    assert not estimate.fits("80GiB")


def test_a_model_that_cannot_be_captured_is_an_error() -> None:
    class Branch(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y.sum() if y.sum() > 0 else y.mean()

    model = Branch().to("meta")
    with pytest.raises(remat.TraceError, match="depends on tensor values"):
        remat.estimate(model, torch.empty(2, 4, device="meta"))
    assert model.linear.weight.is_meta


def test_a_saved_trace_has_the_same_estimate() -> None:
    case = PLAIN["mlp"]()
    traced = remat.trace(case.model, case.args, case.kwargs)
    assert Estimate.of(with_roofline_costs(traced, roofline_for_trace(traced))) == _estimate(case)
    assert roofline_for_trace(traced).name == "cpu"
