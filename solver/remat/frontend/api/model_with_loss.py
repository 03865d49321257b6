"""`ModelWithLoss`: a model and the criterion of its training loop, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat.errors import TraceError
from remat.frontend.common.code_origin import errors_of

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
        of several elements, or that no gradient comes from."""
        if len(inputs) + len(kwargs) < 2 or not inputs:
            raise TraceError(
                "with loss=, the last positional argument is the target of the loss, and those "
                f"before it are the model's; this call has {len(inputs)}: pass the model's inputs, "
                "then the target"
            )
        *model_inputs, target = inputs
        with errors_of(type(self.model).__name__):
            output = self.model(*model_inputs, **kwargs)
        with errors_of(self.criterion_name):
            loss = self.loss(output, target)
        self._check(loss, output)
        return loss

    @property
    def criterion_name(self) -> str:
        """The criterion, as errors name it."""
        return f"the criterion {getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def _check(self, loss: Any, output: Any) -> None:
        """Raise `TraceError` for a result of the criterion that cannot be trained with."""
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise TraceError(
                f"the loss has the shape {tuple(loss.shape)}: reduce it to one number, such as its "
                "mean"
            )
        if not _tensors(loss):
            raise TraceError(
                f"{self.criterion_name} returns no tensor, but an object of the type "
                f"{type(loss).__name__}; it must return the loss"
            )
        is_trained = self.training and torch.is_grad_enabled() and _requires_grad(output)
        if is_trained and not _requires_grad(loss):
            raise TraceError(
                f"no gradient comes from the result of {self.criterion_name}: it is detached, "
                "computed without gradients, or does not use the model's output"
            )


def _requires_grad(tree: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(tree))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
