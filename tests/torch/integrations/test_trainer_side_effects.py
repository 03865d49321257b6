"""The law of side effects through the callback of Transformers' `Trainer`: losses, gradients,
weights and what a step changes besides are those of a run without remat, under accumulation, with a
smaller last batch, and after it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.training.doors import OPTIONS
from tests.helpers.training.side_effects import EFFECTS, WIDTH, Effect, reset_globals
from tests.torch.laws.test_side_effects import assert_equal, copy_of
from torch import nn

pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from remat.integrations.transformers import RematCallback

STEPS = 3
ROWS, LAST_ROWS, MICRO_BATCHES = 8, 4, 2
QUICK = {"unused head"}

CELLS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EFFECTS]


class Trained(nn.Module):
    """A model with an effect, and its loss, as a `Trainer` calls them."""

    def __init__(self, effect: Effect) -> None:
        super().__init__()
        self.effect = effect
        self.model = effect.make()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        args = self.effect.inputs(x)
        return {"loss": self.effect.loss(self.model(*args), self.model, args)}


class Record(TrainerCallback):
    """Changes the model before a step as the effect says, and records what the step leaves."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.observed: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.trained.effect.change(self.trained.model, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        model = self.trained.model
        gradients = {name: p.grad for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        effect_state = self.trained.effect.state(model)
        self.observed.append(copy_of((gradients, buffers, generators, effect_state)))


def trained_with(effect: Effect, folder: Path, callbacks: list[TrainerCallback]) -> Any:
    """Return what each step of a training leaves, its losses, and the weights at the end."""
    reset_globals(nn.Module())
    trained = Trained(effect)
    record = Record(trained)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(MICRO_BATCHES * ROWS + ROWS + LAST_ROWS, WIDTH, generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO_BATCHES,
        optim="sgd",
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=7,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        trained,
        arguments,
        train_dataset=[{"x": row} for row in rows],  # type: ignore[arg-type]
        callbacks=[*callbacks, record],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == len(record.observed) == STEPS
    return record.observed, losses, copy_of(dict(trained.model.named_parameters()))


@pytest.mark.parametrize("name", CELLS)
def test_a_trainer_with_the_callback_has_the_side_effects_of_one_without(
    name: str, tmp_path: Path
) -> None:
    expected = trained_with(EFFECTS[name], tmp_path, [])
    actual = trained_with(
        EFFECTS[name], tmp_path, [RematCallback("100%", **OPTIONS, differentiate="all")]
    )
    assert_equal(actual, expected, name)
