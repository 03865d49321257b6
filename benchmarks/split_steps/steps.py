"""`Steps`: the losses, gradients and peaks of some steps, and their differences."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Steps(NamedTuple):
    """Two steps: the peak of live storages of each, in bytes, and its plan's budget (0 in eager
    mode); then both losses and all gradients."""

    peaks_bytes: list[int]
    budgets_bytes: list[int]
    values: list[torch.Tensor]


def differences(expected: Steps, actual: Steps, losses: int) -> list[float]:
    """Return the difference of each value, of which the first `losses` are losses: the largest
    relative to the largest element, or to a hundredth of the largest of all gradients. The gradient
    of a key's bias before a softmax has rounding errors only."""
    smallest_scale = 0.01 * max(value.abs().max().item() for value in expected.values[losses:])
    return [
        _difference(a, b, smallest_scale if number >= losses else 0.0)
        for number, (a, b) in enumerate(zip(expected.values, actual.values, strict=True))
    ]


def _difference(expected: torch.Tensor, actual: torch.Tensor, smallest_scale: float) -> float:
    scale = max(expected.abs().max().item(), smallest_scale) or 1.0
    return (expected.double() - actual.double()).abs().max().item() / scale
