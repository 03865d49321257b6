"""Eager mode and the plan side by side: what is measured, and that a difference is detected."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from tests.helpers.training import models
from tests.helpers.training.models import Case
from torch import nn

import remat
from remat.errors import TraceError
from remat.frontend.api.comparison import _TensorDifference, loss_of_output
from remat.frontend.api.trial import Trial, run_eager_trial
from remat.limits.units import format_bytes

QUICK = remat.Auto(gap=0.05, time_limit=3.0)


def run_trial(case: Case, budget: str = "80%", **options: Any) -> Trial:
    gm = remat.optimize(
        case.model, budget, case.args, case.kwargs, strategy=QUICK, costs=remat.Roofline("cpu"),
        split="off",
    )  # fmt: skip
    return run_eager_trial(case.model, gm, case.args, case.kwargs, rounds=2, **options)


def assert_equal(trial: Trial) -> None:
    assert trial.equality.gradients > 0
    assert trial.equality.equal_gradients == trial.equality.gradients
    assert trial.equality.largest_difference == trial.equality.largest_relative_difference == 0
    assert trial.equality.equal_buffers == trial.equality.buffers
    assert trial.reference.loss == trial.remat.loss


@pytest.mark.slow
def test_gpt2_with_dropout_is_compared_with_eager_mode() -> None:
    torch.manual_seed(0)
    case = models.gpt2()
    trial = run_trial(case)
    assert_equal(trial)
    assert trial.equality.gradients == len(list(case.model.parameters()))
    assert trial.plan.schedule.recomputed(trial.plan.graph)
    assert trial.remat.peak_bytes < trial.reference.peak_bytes
    assert trial.remat.peak_bytes == pytest.approx(trial.plan.peak_bytes, rel=0.01)
    assert trial.remat.peak_bytes <= trial.plan.peak_bytes
    # Eager mode frees some tensors later than the baseline does.
    assert 1 <= trial.reference.peak_bytes / trial.plan.baseline_peak_bytes <= 1.2
    assert all(p.grad is None for p in case.model.parameters())
    equality, lines = trial.equality, trial.describe().splitlines()
    assert lines[0].split() == ["eager", "remat", "change"]
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "peak, predicted",
        "peak, measured",
        "time, predicted",
        "time, median of 2",
        "loss",
    ]
    assert lines[6:] == [
        "",
        f"{equality.gradients} of {equality.gradients} gradients are equal bit for bit.",
    ]
    other = dataclasses.replace(trial, predicted_reference_bytes=1 << 30)
    assert other.describe().splitlines()[-1] == (
        f"Eager mode takes 1.00 GiB, and the plan without recomputation "
        f"{format_bytes(trial.plan.baseline_peak_bytes)}: `remat estimate` says why."
    )


@pytest.mark.slow
def test_resnet_with_batch_norm_is_compared_with_eager_mode() -> None:
    torch.manual_seed(0)
    case = models.resnet()
    counts = [b for n, b in case.model.named_buffers() if n.endswith("num_batches_tracked")]
    trial = run_trial(case)
    assert_equal(trial)
    assert trial.equality.buffers == 3 * len(counts)
    assert {int(count) for count in counts} == {4}, "eager mode's steps are not the model's"
    counted = f"{trial.equality.buffers} of {trial.equality.buffers}"
    assert f"{counted} buffers that the step changes are equal." in trial.describe()


@pytest.mark.parametrize("name", ["norms", "tied", "mlp-input-grad"])
def test_plain_modules_are_compared_with_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    trial = run_trial(models.PLAIN[name](), "100%")
    assert_equal(trial)
    if name == "mlp-input-grad":
        assert trial.equality.gradients == 6 + 1, "three layers that are trained, and the input"


def test_a_step_under_autocast_is_compared_with_eager_mode() -> None:
    torch.manual_seed(0)
    case = models.PLAIN["mlp-bf16"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trial = run_trial(case, "100%")
    assert_equal(trial)


class WrongWhenCopied(nn.Module):
    """A module that computes something else when copied, as a wrong plan would."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.copied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> WrongWhenCopied:
        other = WrongWhenCopied()
        other.load_state_dict(self.state_dict())
        other.copied = True
        return other

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 2 if self.copied else 1
        y = self.used(x)
        if self.copied:
            y = self.unused(y) * 1.5
        return {"loss": y.square().mean()}


def test_different_gradients_are_reported() -> None:
    torch.manual_seed(0)
    trial = run_trial(Case(WrongWhenCopied(), (torch.randn(4, 8),)), "100%")
    assert (trial.equality.gradients, trial.equality.equal_gradients) == (4, 0)
    assert trial.reference.loss != trial.remat.loss
    assert (trial.equality.buffers, trial.equality.equal_buffers) == (1, 0)
    assert math.isinf(trial.equality.largest_difference), (
        "of a gradient that the plan does not compute"
    )
    text = trial.describe()
    assert "0 of 4 gradients are equal bit for bit." in text
    assert "The largest difference of a gradient is inf" in text
    data = json.loads(json.dumps(trial.to_data(), allow_nan=False))
    assert data["largest_difference"] is None


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "absolute", "relative"),
    [
        ([1.0, INF], [1.5, INF], 0.5, 0.5),
        ([1.0, -INF], [1.5, -INF], 0.5, 0.5),
        ([1.0, NAN], [1.5, NAN], 0.5, 0.5),
        ([1.0, INF], [1.0, -INF], INF, INF),
        ([1.0, INF], [1.0, 2.0], INF, INF),
        ([0.0, 0.0], [0.0, 0.5], 0.5, INF),
    ],
)
def test_the_difference_of_two_tensors_is_of_the_elements_that_differ(
    a: list[float], b: list[float], absolute: float, relative: float
) -> None:
    difference = _TensorDifference.of(torch.tensor(a), torch.tensor(b))
    assert difference == _TensorDifference(False, absolute, relative)


@pytest.mark.parametrize("elements", [0, 3])
def test_equal_elements_of_two_dtypes_do_not_differ(elements: int) -> None:
    a, b = torch.zeros(elements), torch.zeros(elements, dtype=torch.float64)
    assert _TensorDifference.of(a, b) == _TensorDifference(False, 0.0, 0.0)


def test_a_trial_is_available_as_data() -> None:
    torch.manual_seed(0)
    trial = run_trial(models.PLAIN["tied"](), "100%")
    data = json.loads(json.dumps(trial.to_data(), allow_nan=False))
    assert data["eager"] == {
        "peak_bytes": trial.reference.peak_bytes,
        "time_s": trial.reference.time_s,
        "loss": trial.reference.loss,
    }
    assert data["predicted"]["remat_peak_bytes"] == trial.plan.peak_bytes
    assert (data["gradients"], data["equal_gradients"], data["rounds"]) == (1, 1, 2)


class Output:
    def __init__(self, loss: object) -> None:
        self.loss = loss


def test_the_loss_is_taken_from_the_output() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    logits = torch.ones(3, requires_grad=True)
    for output in (Output(loss), loss, (loss, logits), [logits, loss], {"a": logits, "b": loss}):
        assert loss_of_output(output).item() == 2.0
    assert loss_of_output(loss.reshape(1)).shape == ()
    for output, message in (
        (logits, r"a tensor of shape \(3,\)"),
        (torch.tensor(1.0), "without a gradient"),
        (Output(None), "a Output"),
        ({"logits": logits}, "a dict of logits"),
        ((), "a tuple"),
        ((torch.tensor(3), logits), "a tuple"),
    ):
        with pytest.raises(TraceError, match=message):
            loss_of_output(output)


def test_outputs_without_a_loss_are_refused() -> None:
    case = models.PLAIN["two-heads"]()
    with pytest.raises(TraceError, match="a step needs a loss, and the model returned a Answer"):
        run_trial(case, "100%")
    case = models.PLAIN["tied"]()
    gm = remat.optimize(case.model, "100%", strategy=QUICK)
    with pytest.raises(TraceError, match="rounds is 0"):
        run_eager_trial(case.model, gm, case.args, {}, rounds=0)
    with pytest.raises(TraceError, match="cannot be copied"):
        run_eager_trial(case.model, gm, (torch.randn(64, 24, requires_grad=True) * 2,), {})
    trace = remat.measure(remat.trace(case.model, case.args), remat.Roofline("cpu"))
    program = remat.rewrite(trace, remat.solve(trace, "100%", QUICK).schedule)
    with pytest.raises(TraceError, match="has no plan"):
        run_eager_trial(case.model, remat.lower(program, copy.deepcopy(case.model)), case.args, {})


@pytest.mark.gpu
def test_a_trial_on_the_gpu_measures_the_planned_peak() -> None:
    """The allocated bytes are what the replayed allocator predicts."""
    from remat.allocator.budget_fitting import uses_expandable_segments
    from remat.commands.models.batches import BatchSizes
    from remat.commands.models.sources import load_training_step

    sizes = ["n_layer=6", "n_embd=512", "n_head=8", "vocab_size=8192"]
    step = load_training_step("hf:gpt2", BatchSizes(8, 256), device="cuda", overrides=sizes)
    gm = remat.optimize(step.model, "60%", step.args, step.kwargs, strategy=QUICK)
    trial = run_eager_trial(step.model, gm, step.args, step.kwargs)
    assert trial.equality.largest_relative_difference <= 1e-4
    prediction = trial.plan.allocator
    assert prediction is not None
    allocated_bytes = prediction.allocated(is_expandable=uses_expandable_segments())
    assert 0.98 * trial.plan.peak_bytes <= trial.remat.peak_bytes <= 1.002 * allocated_bytes
    # Without the weights of the other model, which are on the device too.
    assert 0.98 <= trial.reference.peak_bytes / trial.plan.baseline_peak_bytes <= 1.2
