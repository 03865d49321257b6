"""`optimize(..., loss=criterion)`: further arguments, metrics, and other models in the loss."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat

COSTS = remat.Roofline("cpu")
WORDS = 300


class Policy(nn.Module):
    """Returns logits; `padding` masks hidden states, as an attention mask does."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, 16)
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layer(self.embedding(ids))
        return self.head(x if padding is None else x * padding.unsqueeze(-1))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (4, 16), generator=generator)
    padding = torch.ones(4, 16)
    padding[:, 12:] = 0
    old = -torch.rand(4, 16, generator=generator)
    return {"ids": ids, "padding": padding, "old": old, "advantages": torch.randn(4)}


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def clipped(
    logits: torch.Tensor, ids: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor,
    padding: torch.Tensor | None = None, *, clip: float = 0.2,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Return PPO's loss of each token, and metrics, one of which requires a gradient."""
    ratio = (log_probs(logits, ids) - old).exp()
    weight = advantages.unsqueeze(-1)
    per_token = -torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight)
    mask = torch.ones_like(old) if padding is None else padding
    metrics = {"ratio": ratio.mean(), "clipped": (ratio > 1 + clip).float().mean()}
    return (per_token * mask).sum() / mask.sum(), metrics


def check_equal(
    model: nn.Module, step: nn.Module, eager: Callable[[nn.Module], Any], call: Callable[[], Any]
) -> None:
    """Check that `call` returns what `eager(model)` does, and its loss has the same gradients."""
    results = []
    for run in (lambda: eager(model), call):
        torch.manual_seed(1)
        step.zero_grad()
        result = run()
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        results.append((result, [copy.copy(p.grad) for p in step.parameters()]))
    torch.testing.assert_close(results[1], results[0])


CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "positional": lambda step, b: step(b["ids"], b["ids"], b["old"], b["advantages"]),
    "positional for the model": lambda step, b: step(
        b["ids"], b["padding"], b["ids"], b["old"], b["advantages"]
    ),
    "keywords of the loss": lambda step, b: step(
        b["ids"], None, b["ids"], old=b["old"], advantages=b["advantages"]
    ),
    "a gap in the arguments": lambda step, b: step(
        b["ids"], None, b["ids"], b["advantages"], old=b["old"]
    ),
    "keywords for both": lambda step, b: step(**b),
    "an option of the loss": lambda step, b: step(**b, clip=0.1),
}


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, "100%") for name in CALLS), ("keywords for both", "40%")]
)
def test_arguments_go_to_model_and_loss_by_their_signatures(name: str, budget: str) -> None:
    b = batch()
    model = Policy()
    step = remat.optimize(model, budget, loss=clipped, costs=COSTS)
    for_model: dict[str, Any] = {}
    for_loss: dict[str, Any] = {}
    if "model" in name:
        for_model["padding"] = b["padding"]
    elif "both" in name or "option" in name:
        for_model["padding"] = for_loss["padding"] = b["padding"]
    if "option" in name:
        for_loss["clip"] = 0.1

    def eager(model: nn.Module) -> Any:
        return clipped(
            model(b["ids"], **for_model), b["ids"], b["old"], b["advantages"], **for_loss
        )

    check_equal(model, step, eager, lambda: CALLS[name](step, b))


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda logits: logits.square().mean(), 1),
        (lambda logits, *targets: F.mse_loss(logits, targets[0]), 2),
        (lambda logits, target=None: F.mse_loss(logits, target), 2),
        (functools.partial(F.mse_loss, reduction="sum"), 2),
        (nn.MSELoss(), 2),
    ],
)
def test_the_signature_gives_the_number_of_targets(loss: Any, count: int) -> None:
    model = nn.Linear(3, 3)
    args = torch.randn(2, 3), torch.randn(2, 3)
    step = remat.optimize(model, "100%", args[:count], loss=loss, costs=COSTS)
    check_equal(
        model, step, lambda m: loss(m(args[0]), *args[1:count]), lambda: step(*args[:count])
    )


def test_any_keyword_of_the_loss() -> None:
    def loss(logits: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        assert others.keys() == {"old", "advantages", "labels"}
        return F.cross_entropy(logits.flatten(0, 1), others["labels"].flatten())

    b = batch()
    model = Policy()
    step = remat.optimize(model, "100%", loss=loss, costs=COSTS)
    step(**b, labels=b["ids"]).backward()


def test_no_gradient_comes_from_metrics() -> None:
    b = batch()
    plain = remat.optimize(Policy(), "100%", (), b, loss=clipped, costs=COSTS)

    def without_gradient(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = clipped(*args, **kwargs)
        return loss, {name: value.detach() for name, value in metrics.items()}

    functools.update_wrapper(without_gradient, clipped)
    detached = remat.optimize(Policy(), "100%", (), b, loss=without_gradient, costs=COSTS)
    assert plain.plan is not None
    assert detached.plan is not None
    assert plain.plan.peak_bytes <= detached.plan.peak_bytes
    loss, metrics = plain(**b)
    with pytest.raises(remat.GuardError, match=r"a gradient arrived at the output '\[1\].ratio'"):
        (loss + metrics["ratio"]).backward()


# -- other models and tensors in the loss ---------------------------------------------------------


def reference_model() -> Policy:
    """Return a frozen model in evaluation mode."""
    return Policy(seed=5).requires_grad_(False).eval()


def distillation(
    logits: torch.Tensor, ids: torch.Tensor, reference: nn.Module, scale: torch.Tensor
) -> torch.Tensor:
    with torch.no_grad():
        target = reference(ids).log_softmax(-1)
    divergence = F.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="none")
    return (divergence.sum(-1) * scale).mean()


GLOBAL_REFERENCE = reference_model()
GLOBAL_SCALE = torch.linspace(0, 1, 16)


def with_globals(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return distillation(logits, ids, GLOBAL_REFERENCE, GLOBAL_SCALE)


class Trainer:
    """The loss is a method, and the models are attributes."""

    def __init__(self) -> None:
        self.models = {"reference": reference_model(), "unused": nn.Linear(2, 2)}
        self.options = [GLOBAL_SCALE]

    def loss(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return distillation(logits, ids, self.models["reference"], self.options[0])

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(logits, ids)


class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reference = reference_model()
        self.register_buffer("scale", GLOBAL_SCALE)

    def forward(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return distillation(logits, ids, self.reference, self.scale)


class Hidden(nn.Module):
    """A list hides the reference from `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = [reference_model()]

    def forward(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return distillation(logits, ids, self.reference[0], GLOBAL_SCALE)


class OfClass:
    reference = reference_model()

    @classmethod
    def loss(cls, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return distillation(logits, ids, cls.reference, GLOBAL_SCALE)


class Slots:
    __slots__ = ("reference",)

    def __init__(self) -> None:
        self.reference = reference_model()


def in_slot() -> Any:
    slots = Slots()
    return lambda logits, ids: distillation(logits, ids, slots.reference, GLOBAL_SCALE)


def in_closure() -> Any:
    reference, scale = reference_model(), GLOBAL_SCALE.clone()
    return lambda logits, ids: distillation(logits, ids, reference, scale)


def in_default() -> Any:
    def loss(logits: Any, ids: Any, reference: Any = GLOBAL_REFERENCE) -> Any:
        return distillation(logits, ids, reference, GLOBAL_SCALE)

    return loss


LOSSES: dict[str, Callable[[], Any]] = {
    "global variables": lambda: with_globals,
    "closure variables": in_closure,
    "a default argument": in_default,
    "a method": lambda: Trainer().loss,
    "an object": Trainer,
    "a partial": lambda: functools.partial(
        distillation, reference=reference_model(), scale=GLOBAL_SCALE
    ),
    "a module": Distillation,
    "a list of a module": Hidden,
    "a class": lambda: OfClass.loss,
    "a slot": in_slot,
}


@pytest.mark.parametrize(
    ("where", "budget"),
    [
        *((where, "100%") for where in LOSSES),
        pytest.param("closure variables", "50%", marks=pytest.mark.slow),
    ],
)
def test_a_loss_may_use_another_model(where: str, budget: str) -> None:
    model, loss, ids = Policy(), LOSSES[where](), batch()["ids"]
    step = remat.optimize(model, budget, (ids, ids), loss=loss, costs=COSTS)
    for mode in (True, True, False):
        step.train(mode)
        check_equal(model, step, lambda m: loss(m(ids), ids), lambda: step(ids, ids))
    assert set(model.state_dict()) == set(Policy().state_dict())


def test_the_model_itself_in_the_loss_is_no_other_model() -> None:
    model, ids = Policy(), batch()["ids"]

    def consistency(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(logits, model(ids))

    step = remat.optimize(model, "100%", (ids, ids), loss=consistency, costs=COSTS)
    assert not list(step.loss_variables.parameters())
    check_equal(model, step, lambda m: consistency(m(ids), ids), lambda: step(ids, ids))


def test_variables_may_get_other_values() -> None:
    reference, scale = reference_model(), GLOBAL_SCALE

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return distillation(logits, ids, reference, scale)

    model, ids = Policy(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids, ids), loss=loss, costs=COSTS)

    def check() -> None:
        check_equal(model, step, lambda m: loss(m(ids), ids), lambda: step(ids, ids))

    check()
    with torch.no_grad():
        reference.head.weight.mul_(2)
    check()
    reference = Policy(seed=9).requires_grad_(False).eval()
    check()
    scale = torch.rand(16)
    check()
    scale = torch.rand(4, 16)
    check()
    reference.train()
    check()


def test_another_model_before_the_first_call() -> None:
    reference = reference_model()

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return distillation(logits, ids, reference, GLOBAL_SCALE)

    model, ids = Policy(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids, ids), loss=loss, costs=COSTS)
    reference = Policy(seed=9).requires_grad_(False).eval()
    check_equal(model, step, lambda m: loss(m(ids), ids), lambda: step(ids, ids))


class Weighted:
    """A loss with numbers in attributes, and in an object."""

    def __init__(self) -> None:
        self.weight = 0.5
        self.options = SimpleNamespace(power=2)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs().pow(self.options.power).mean() * self.weight

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(output, target)


def weighted(output: torch.Tensor, target: torch.Tensor, weights: Weighted) -> torch.Tensor:
    return weights.loss(output, target)


NUMBERS: dict[str, Callable[[Weighted], Any]] = {
    "a method": lambda weights: weights.loss,
    "an object": lambda weights: weights,
    "a partial of a method": lambda weights: functools.partial(weights.loss),
    "a partial with an object": lambda weights: functools.partial(weighted, weights=weights),
    "a closure": lambda weights: lambda output, target: weights.loss(output, target),
}


@pytest.mark.parametrize("where", NUMBERS)
def test_numbers_of_a_loss_are_guarded(where: str) -> None:
    weights, model = Weighted(), nn.Linear(4, 4)
    loss, args = NUMBERS[where](weights), (torch.randn(2, 4), torch.randn(2, 4))
    step = remat.optimize(model, "100%", args, loss=loss, costs=COSTS)
    for change in (
        lambda: None,
        lambda: setattr(weights, "weight", 3.0),
        lambda: setattr(weights.options, "power", 3),
        lambda: setattr(weights, "options", SimpleNamespace(power=1)),
    ):
        change()
        check_equal(model, step, lambda m: loss(m(args[0]), args[1]), lambda: step(*args))


def test_a_parameter_in_a_variable_is_trained() -> None:
    log_scale = nn.Parameter(torch.tensor(0.3))

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((logits * log_scale.exp()).flatten(0, 1), ids.flatten())

    model, ids = Policy(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids, ids), loss=loss, costs=COSTS)
    assert any(p is log_scale for p in step.parameters())
    check_equal(model, step, lambda m: loss(m(ids), ids), lambda: step(ids, ids))


def test_a_result_in_a_variable_is_refused() -> None:
    scale = nn.Parameter(torch.ones(())).exp()  # in eager mode, gradients flow through it

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((logits * scale).flatten(0, 1), ids.flatten())

    ids = batch()["ids"]
    with pytest.raises(remat.TraceError, match="pass the tensor as an argument of the loss"):
        remat.optimize(Policy(), "100%", (ids, ids), loss=loss, costs=COSTS)


logits = torch.ones(2, 3)
"""A variable of a script: the losses here have attributes and arguments of this name."""


def test_only_variables_that_the_code_reads_are_in_the_step() -> None:
    def loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), ids.flatten())

    class Output(Policy):
        def forward(self, ids: torch.Tensor) -> Any:  # type: ignore[override]
            return SimpleNamespace(logits=super().forward(ids))

    ids = batch()["ids"]
    step = remat.optimize(Output(), "100%", (ids, ids), loss=loss, costs=COSTS)
    assert not list(step.loss_variables.buffers())


def test_two_variables_of_one_name() -> None:
    def scaled(scale: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (x.square() * scale).mean()

    one, two = scaled(torch.tensor(2.0)), scaled(torch.tensor(3.0))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return one(logits) + two(logits.exp())

    model, ids = Policy(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids,), loss=loss, costs=COSTS)
    check_equal(model, step, lambda m: loss(m(ids)), lambda: step(ids))


def test_a_loss_may_update_a_tensor() -> None:
    average = torch.zeros(())

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        with torch.no_grad():
            average.mul_(0.9).add_(entropy.detach(), alpha=0.1)
        return entropy * average

    model, ids = Policy().eval(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids, ids), loss=loss, costs=COSTS)
    assert average == 0
    averages = []
    for run in (lambda: loss(model(ids), ids), lambda: step(ids, ids)):
        average.zero_()
        averages.append((run(), run(), average.clone()))
    assert averages[0] == averages[1]


@functools.lru_cache
def cached_weights(words: int) -> torch.Tensor:
    return torch.linspace(0.1, 1, words)


def test_a_capture_leaves_nothing_in_the_caches_of_functions() -> None:
    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), cached_weights(WORDS))

    model, ids = Policy().eval(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids, ids), loss=loss, costs=COSTS)
    check_equal(model, step, lambda m: loss(m(ids), ids), lambda: step(ids, ids))


def test_copies_use_the_same_variables() -> None:
    model, ids = Policy().eval(), batch()["ids"]
    step = remat.optimize(model, "100%", (ids, ids), loss=with_globals, costs=COSTS)
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert torch.equal(copied(ids, ids), step(ids, ids))
