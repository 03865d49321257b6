"""`ModelWithLoss`: a model and the criterion of its training loop, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from remat.errors import TraceError

Criterion = Callable[[Any, Any], Any]
"""A function or module that computes a loss from a model's output and a target."""


class ModelWithLoss(nn.Module):
    """A module that returns `loss(model(*inputs, **kwargs), target)`. Its last positional argument
    is the target.

    With the criterion in the planned step, the model's output is a value like any other: it may be
    recomputed, or exist only in pieces.
    """

    def __init__(self, model: nn.Module, loss: Criterion) -> None:
        if isinstance(loss, type):
            raise TypeError(f"loss is the class {loss.__name__}; pass an instance of it")
        if not callable(loss):
            raise TypeError(
                f"loss is {loss!r}; it must be a function of the model's output and a target, such "
                "as torch.nn.CrossEntropyLoss()"
            )
        super().__init__()
        self.model = model
        self.loss = loss
        self.train(model.training)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the loss of one batch. Raises `TraceError` without a target, and for a loss
        of several elements."""
        if len(inputs) + len(kwargs) < 2 or not inputs:
            raise TraceError(
                "with loss=, the last positional argument is the target of the loss, and those "
                f"before it are the model's; this call has {len(inputs)}: pass the model's inputs, "
                "then the target"
            )
        *model_inputs, target = inputs
        loss = self.loss(self.model(*model_inputs, **kwargs), target)
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise TraceError(
                f"the loss has the shape {tuple(loss.shape)}: reduce it to one number, such as its "
                "mean"
            )
        return loss
