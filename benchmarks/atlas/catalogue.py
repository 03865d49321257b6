"""`Entry`: a model of the atlas, and the wrapper that returns its loss only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


@dataclass(frozen=True)
class Entry:
    """A model to trace: its name, a line about its size, and what builds it with a batch."""

    name: str
    title: str
    build: Build
    dtype: torch.dtype = torch.bfloat16


class LossOnly(nn.Module):
    """A model of transformers that returns its loss only, so that nothing else stays allocated."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.model(**batch).loss
