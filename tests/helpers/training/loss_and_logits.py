"""A model that returns its loss and its logits, which are its largest tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from remat.frontend.memory.meter import allocated_peak

WORDS = 700


class LossAndLogits(nn.Module):
    """A model whose largest tensor is an output next to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits}


def batch() -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 64), generator=torch.Generator().manual_seed(0))


LOGITS_BYTES = batch().numel() * WORDS * 4


def loss_and_logits() -> LossAndLogits:
    torch.manual_seed(0)
    return LossAndLogits()


def gradients_of_step(model: Any) -> dict[str, torch.Tensor]:
    """Run a step that keeps only the loss, and return its gradients."""
    model.zero_grad(set_to_none=True)
    model(batch())["loss"].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def measured_peak(model: nn.Module, run: Any) -> int:
    """Return the peak by the allocator of a warm step that keeps only the loss."""
    gradients_of_step(model)
    model.zero_grad(set_to_none=True)
    ids = batch()
    peak = allocated_peak(lambda: run(ids)["loss"].backward())
    return peak + ids.nbytes + sum(p.nbytes for p in model.parameters())


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
