"""`optimize(..., loss=criterion)`: the loss of the training loop is part of the plan."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.models import Case
from tests.helpers.training.recorded_steps import assert_same, relative_error, run_step
from torch import nn

import remat

COSTS = remat.Roofline("cpu")
WORDS = 600


class LogitsOnly(nn.Module):
    """Returns the logits of each token; the training loop computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.layer = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 24))
        self.head = nn.Linear(24, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(x + self.layer(x))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the labels that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class LearnedTemperature(nn.Module):
    """A criterion with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("weight", torch.linspace(0.5, 1.5, WORDS))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scaled = logits.flatten(0, 1) * self.log_scale.exp()
        return F.cross_entropy(scaled, labels.flatten(), self.weight)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (8, 32), generator=generator)
    labels = ids.clone()
    labels[:, ::5] = -100
    return ids, labels


def model() -> LogitsOnly:
    torch.manual_seed(0)
    return LogitsOnly()


def squares(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error: its scalar is in the storage of all squares."""
    target = labels.clamp(min=0).unsqueeze(-1) / WORDS
    return F.mse_loss(logits.sigmoid(), target.expand_as(logits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("criterion", "budget"),
    [
        pytest.param(cross_entropy, "50%", marks=pytest.mark.slow),
        (cross_entropy, "30%"),
        (LearnedTemperature(), "30%"),
        (squares, "50%"),
    ],
)
def test_a_budget_below_the_logits_is_met(criterion: Any, budget: str) -> None:
    case = Case(model(), inputs(), loss=lambda loss: loss)
    with pytest.raises(remat.InfeasibleBudget):
        remat.optimize(case.model, budget, inputs(), loss=criterion, costs=COSTS, split="off")

    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(case.model)
            self.loss = copy.deepcopy(criterion)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.loss(self.model(ids), labels)

    eager = run_step(Eager(), case)
    step = remat.optimize(case.model, budget, inputs(), loss=criterion, costs=COSTS)
    planned = run_step(step, case)
    assert_same(planned, eager, tolerance=1e-6)
    assert step.plan is not None
    assert step.plan.graph.splits
    fraction = float(budget.rstrip("%")) / 100
    assert planned.peak_bytes <= fraction * step.plan.baseline_peak_bytes
    accumulated = run_step(step, case, zero_grad=False)
    for name, gradient in eager.gradients.items():
        total = accumulated.gradients[name]
        assert gradient is not None
        assert total is not None
        assert relative_error(2 * gradient, total) < 1e-6


def test_without_splits_gradients_are_equal_bit_for_bit() -> None:
    eager = model()
    torch.manual_seed(1)
    ids, labels = inputs()
    cross_entropy(eager(ids), labels).backward()
    planned = model()
    step = remat.optimize(planned, "100%", inputs(), loss=cross_entropy, costs=COSTS, split="off")
    torch.manual_seed(1)
    step(ids, labels).backward()
    for actual, expected in zip(planned.parameters(), eager.parameters(), strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        assert torch.equal(actual.grad, expected.grad)


def test_the_model_stays_as_it_is() -> None:
    original = model()
    state = {name: value.clone() for name, value in original.state_dict().items()}
    step = remat.optimize(original, "90%", inputs(), loss=cross_entropy, costs=COSTS)
    assert step.model is original
    assert original.state_dict().keys() == state.keys()
    ids, labels = inputs()
    original.eval()
    assert original(ids).shape == (8, 32, WORDS)
    step.eval()
    assert torch.equal(step(ids, labels), cross_entropy(original(ids), labels))


def test_keyword_arguments_are_those_of_the_model() -> None:
    class Scaled(LogitsOnly):
        def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(ids) * scale

    step = remat.optimize(Scaled(), "100%", loss=cross_entropy, costs=COSTS)
    ids, labels = inputs()
    first, second = (step(ids, labels, scale=scale) for scale in (1.0, 3.0))
    assert first != second
    for args in ((), (ids,)):
        with pytest.raises(remat.TraceError, match="the last positional arguments are the loss's"):
            step(*args, **({} if args else {"scale": 1.0}))


@pytest.mark.slow
def test_copies_and_pickles_keep_the_loss() -> None:
    ids, target = inputs()[0], torch.zeros(8, 32, WORDS)
    step = remat.optimize(model(), "90%", (ids, target), loss=nn.MSELoss(), costs=COSTS)
    step.eval()
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert torch.equal(copied(ids, target), step(ids, target))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("cross_entropy", "must be a function of the model's output and a target"),
        (nn.CrossEntropyLoss, "loss is the class CrossEntropyLoss; pass an instance of it"),
    ],
)
def test_what_is_no_function_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        remat.optimize(model(), "50%", inputs(), loss=loss)


def test_a_loss_of_several_elements_is_refused() -> None:
    def unreduced(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")

    with pytest.raises(remat.TraceError, match=r"the loss has the shape \(256,\): reduce it"):
        remat.optimize(model(), "90%", inputs(), loss=unreduced, costs=COSTS)


def test_an_infeasible_budget_of_a_model_without_a_loss_mentions_the_option() -> None:
    with pytest.raises(remat.InfeasibleBudget, match=r"600 KiB are outputs .* as `loss`, and they"):
        remat.optimize(model(), "20%", inputs()[:1], costs=COSTS)


def constant(output: torch.Tensor, target: torch.Tensor) -> dict[str, int]:
    return {"loss": 1}


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.detach().mean()


def branching(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean() if target.sum() > 0 else output.sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "^the criterion CrossEntropyLoss cannot be captured at "),
        (branching, r"^the criterion branching cannot be captured at .*in branching: return out"),
        (constant, "^the criterion constant returns no tensor, but an object of the type dict"),
        (detached, "^no gradient comes from the result of the criterion detached"),
    ],
)
def test_errors_of_the_criterion_name_it(loss: Any, message: str) -> None:
    batch = (torch.ones(2, 4), torch.ones(5, 7))
    with pytest.raises(remat.TraceError, match=message):
        remat.optimize(nn.Linear(4, 3), "100%", batch, loss=loss, costs=COSTS)


def test_errors_of_the_model_name_the_model_not_the_wrapper() -> None:
    batch = (torch.ones(2, 4), torch.ones(2, 3))
    with pytest.raises(remat.TraceError, match=r"^Linear cannot be captured"):
        remat.optimize(nn.Linear(5, 3), "100%", batch, loss=nn.MSELoss(), costs=COSTS)
