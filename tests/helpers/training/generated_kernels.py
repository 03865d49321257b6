"""A small model for tests of code generation: few kernels, of all kinds that Inductor generates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, CLASSES = 64, 500


class _Layer(nn.Module):
    """A gated MLP with dropout, on normalized activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.inner(self.norm(x)))
        return x + F.dropout(self.outer(inner), 0.1)


class _Classifier(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.Sequential(*(_Layer() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.embedding(ids))), ids)


def classifier(layers: int = 2, rows: int = 1024) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model whose output is its loss, and its batch: its steps have pointwise kernels,
    reductions of both kinds, and kernels that generate random numbers."""
    return _Classifier(layers), {"ids": torch.randint(0, CLASSES, (rows,))}
