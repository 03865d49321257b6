"""The law of training loops: losses and weights after ten steps equal those without remat, bit for
bit, and the peak of a step is at most the planned one.

The recipes of docs/how-to/training-loops.md. QLoRA is tested in integrations/test_quantized.py,
TRL's trainers in integrations/test_trl.py, accumulation under FSDP2 in blocks/test_fsdp2.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.block_models import Block
from torch import Tensor, nn

import remat
from remat.frontend.api.enable import is_enabled
from remat.frontend.memory.meter import measure_step

STEPS = 10
OPTIONS: dict[str, Any] = {
    "costs": remat.Roofline("cpu"),
    "split": "off",
    "strategy": remat.Auto(time_limit=3),
}
SCOPES = ("model", "blocks")

Wrap = Callable[[nn.Module], nn.Module]


def identity(model: nn.Module) -> nn.Module:
    return model


def enabled(budget: int | str, **options: Any) -> Wrap:
    return lambda model: remat.enable(model, budget, **OPTIONS, **options)


@dataclass
class Training:
    """Losses, measured peaks and final state of a training, and the plan of each step."""

    losses: list[Tensor] = field(default_factory=list)
    peaks_bytes: list[int] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    plans: list[Any] = field(default_factory=list)

    def run(self, model: nn.Module, loss_of: Callable[[], Tensor], constants: list[Tensor]) -> None:
        """Run a forward and backward, and record the loss, the peak, and the plan that ran."""

        def one() -> None:
            loss = loss_of()
            loss.backward()
            self.losses.append(loss.detach())

        self.peaks_bytes.append(measure_step(one, constants).peak_bytes)
        if is_enabled(model):
            self.plans.append(remat.plans(model)[-1])


def assert_equal(actual: Training, expected: Training) -> None:
    assert len(expected.losses) == len(actual.losses) >= STEPS
    assert len({loss.item() for loss in expected.losses}) == len(expected.losses)
    for step, (a, b) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert torch.equal(a, b), f"loss of step {step}: {a} instead of {b}"
    assert actual.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        difference = (actual.state[name].double() - tensor.double()).abs().max()
        assert torch.equal(actual.state[name], tensor), f"{name} differs by {difference:.2e}"


def constants_of(model: nn.Module, *batch: Tensor) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *batch]


Batches = Callable[[int, torch.Generator], list[Tensor]]
"""Returns the tensors of a step from its number and a generator."""


def train(
    model: nn.Module,
    wrap: Wrap,
    optimizer: torch.optim.Optimizer,
    batch_of: Batches,
    loss_of: Callable[..., Tensor],
) -> Training:
    """Train a model; `loss_of` takes the tensors of a step."""
    training = Training()
    wrap(model)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = batch_of(number, generator)
        optimizer.zero_grad()
        torch.manual_seed(number)
        training.run(model, functools.partial(loss_of, *batch), constants_of(model, *batch))
        optimizer.step()
    training.state = model.state_dict()
    return training


# -- two adapters -------------------------------------------------------------------------------


def two_adapters() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    small = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    large = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(LlamaForCausalLM(config), small, adapter_name="small")  # type: ignore[arg-type]
    model.add_adapter("large", large)
    return model.train()


def train_two_adapters(wrap: Wrap) -> Training:
    """The adapters take turns."""
    model = two_adapters()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora" in n], 1e-2)

    def batch_of(number: int, generator: torch.Generator) -> list[Tensor]:
        model.set_adapter("small" if number % 2 == 0 else "large")
        return [torch.randint(0, 128, (8, 48), generator=generator)]

    return train(
        model, wrap, optimizer, batch_of, lambda ids: model(input_ids=ids, labels=ids).loss
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scope", SCOPES)
def test_two_adapters_that_take_turns(scope: str) -> None:
    pytest.importorskip("peft")
    expected = train_two_adapters(identity)
    actual = train_two_adapters(enabled("60%", scope=scope, outputs="dropped"))
    assert_equal(actual, expected)
    assert len({id(plan) for plan in actual.plans}) == 2, "one plan for each adapter"
    for number in range(2, STEPS):
        peak_bytes, plan = actual.peaks_bytes[number], actual.plans[number]
        assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes
        assert peak_bytes < 0.8 * expected.peaks_bytes[number]


# -- a momentum encoder -------------------------------------------------------------------------


def encoder() -> nn.Sequential:
    return nn.Sequential(*(Block(32) for _ in range(3)), nn.Linear(32, 16))


class MomentumContrast(nn.Module):
    """MoCo (He et al., 2020): a queue of negative keys, and an encoder of keys that follows the
    query's."""

    queue: Tensor
    position: Tensor

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(rows, 16), dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update_key(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        rows = (self.position + torch.arange(len(keys))) % len(self.queue)
        self.queue.index_copy_(0, rows, keys)
        self.position.add_(len(keys)).remainder_(len(self.queue))

    def forward(self, view: Tensor, other_view: Tensor) -> Tensor:
        queries = F.normalize(self.query(view), dim=1)
        self.update_key()
        with torch.no_grad():
            keys = F.normalize(self.key(other_view), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ self.queue.clone().T
        self.enqueue(keys)
        logits = torch.cat([positive, negative], dim=1) / 0.07
        return F.cross_entropy(logits, torch.zeros(len(view), dtype=torch.long))


class PointerContrast(MomentumContrast):
    """The queue of the authors' code: its position is a Python integer, and it is written by
    slice."""

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        start = int(self.position)
        self.queue[start : start + len(keys)] = keys
        self.position.fill_((start + len(keys)) % len(self.queue))


def train_momentum(wrap: Wrap, kind: type[MomentumContrast]) -> Training:
    torch.manual_seed(0)
    model = kind()

    def two_views(_: int, generator: torch.Generator) -> list[Tensor]:
        image = torch.randn(128, 32, generator=generator)
        return [image + 0.1 * torch.randn(128, 32, generator=generator) for _ in range(2)]

    optimizer = torch.optim.AdamW(model.query.parameters(), 1e-3)
    return train(model, wrap, optimizer, two_views, model)


@pytest.mark.parametrize(
    ("kind", "scope"),
    [
        (MomentumContrast, "model"),
        pytest.param(MomentumContrast, "blocks", marks=pytest.mark.slow),
        pytest.param(PointerContrast, "auto", marks=pytest.mark.slow),
    ],
)
def test_a_momentum_encoder_with_a_queue(kind: type[MomentumContrast], scope: str) -> None:
    expected = train_momentum(identity, kind)
    actual = train_momentum(enabled("80%", scope=scope), kind)
    assert_equal(actual, expected)
    for number in range(1, STEPS):
        peak_bytes, plan = actual.peaks_bytes[number], actual.plans[number]
        assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes
        assert peak_bytes < 0.85 * expected.peaks_bytes[number]


# -- a generator and a discriminator ------------------------------------------------------------


def train_adversaries(wrap: Wrap, wrap_generator: Wrap) -> dict[str, Training]:
    """Return the trainings of the discriminator, which runs on real and on generated rows before
    one backward, and of the generator, whose step runs through the discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(*(Block(32) for _ in range(2)))
    discriminator = nn.Sequential(*(Block(32) for _ in range(3)), nn.Linear(32, 1))
    wrap(discriminator)
    wrap_generator(generator)
    trainings = {"discriminator": Training(), "generator": Training()}
    optimizers = [
        torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.5, 0.9))
        for model in (discriminator, generator)
    ]
    samples = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        real, noise = (torch.randn(256, 32, generator=samples) for _ in range(2))
        torch.manual_seed(number)
        with torch.no_grad():
            fake = generator(noise)

        def discriminate(real: Tensor = real, fake: Tensor = fake) -> Tensor:
            return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()

        def generate(noise: Tensor = noise) -> Tensor:
            return F.softplus(-discriminator(generator(noise))).mean()

        for optimizer in optimizers:
            optimizer.zero_grad()
        constants = constants_of(discriminator, real, fake)
        trainings["discriminator"].run(discriminator, discriminate, constants)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        constants = [*constants_of(discriminator), *constants_of(generator, noise)]
        trainings["generator"].run(generator, generate, constants)
        optimizers[1].step()
    trainings["discriminator"].state = discriminator.state_dict()
    trainings["generator"].state = generator.state_dict()
    return trainings


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", pytest.param("blocks", marks=pytest.mark.slow)])
def test_a_discriminator_that_is_called_twice(scope: str) -> None:
    expected = train_adversaries(identity, identity)
    budget_bytes = expected["discriminator"].peaks_bytes[-1] * 7 // 10
    options: dict[str, Any] = {"scope": scope, "outputs": "dropped"}
    discriminator = enabled(budget_bytes, in_flight=2, **options)
    actual = train_adversaries(discriminator, enabled("80%", **options))
    for name in expected:
        assert_equal(actual[name], expected[name])
    twice, through = actual["discriminator"], actual["generator"]
    for number in range(1, STEPS):
        assert twice.peaks_bytes[number] <= twice.plans[number].peak_bytes <= budget_bytes
        assert through.peaks_bytes[number] < 0.85 * expected["generator"].peaks_bytes[number]
