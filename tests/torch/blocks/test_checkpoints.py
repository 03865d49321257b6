"""Checkpoints in a model that is planned by blocks: the plan overrides them."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.helpers.training.block_models import (
    Block,
    Net,
    Output,
    Routed,
    enabled,
    peak_of,
    plan_of,
)
from tests.helpers.training.steps import assert_same_steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.frontend.capture.model.wrapped_code import checkpointing_disabled, checkpointing_enabled


class Inside(Routed):
    """A block that checkpoints a part of itself."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


class Around(Net):
    """A model that checkpoints each block, and its head."""

    reentrant = True

    def forward(self, ids: torch.Tensor) -> Output:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x: Any = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Any = checkpoint(self.head, x, use_reentrant=self.reentrant)
        return Output(F.cross_entropy(logits, ids), logits)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "place",
    [
        "inside",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("around", "around what is captured")),
    ],
)
def test_the_plan_overrides_checkpoints_in_the_model(
    place: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Inside, Around):
        monkeypatch.setattr(kind, "reentrant", reentrant)
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (256,))
    block: type[nn.Module] = {"inside": Inside, "around": Routed}.get(place, Block)
    model_class = Net if place == "inside" else Around
    model = model_class([block(32) for _ in range(3)])
    eager = copy.deepcopy(model)
    enabled(model, "75%")
    assert_same_steps(model, eager, ids, seeds=(1, 2))
    plan = plan_of(model)
    assert peak_of(model, ids) <= plan.peak_bytes + 64
    assert plan.peak_bytes <= 0.75 * plan.baseline_peak_bytes


def test_checkpointing_in_other_threads_is_unaffected() -> None:
    module: Any = torch.utils.checkpoint
    before = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.apply
    seen: list[int] = []
    entered, exited = threading.Event(), threading.Event()

    def runs() -> int:
        """Return how often the forward of a checkpoint runs in a step."""
        calls: list[int] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x.sin().sin()

        for reentrant in (True, False):
            output: Any = checkpoint(
                forward, torch.ones(2, requires_grad=True), use_reentrant=reentrant
            )
            output.sum().backward()
        return len(calls)

    def other() -> None:
        entered.wait(60)
        seen.append(runs())
        with checkpointing_disabled():
            seen.append(runs())
            exited.set()
            with checkpointing_enabled():
                seen.append(runs())

    thread = threading.Thread(target=other)
    thread.start()
    with checkpointing_disabled():
        assert runs() == 2
        entered.set()
        assert exited.wait(60)
    thread.join(60)
    assert seen == [4, 2, 4]
    after = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.apply
    assert after == before
    assert runs() == 4
