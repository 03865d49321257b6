"""Gradient accumulation inside the backward graph.

Autograd gets all of a node's gradients at once, so with `.grad` already there a second full set
would live beside it. Adding each gradient into its parameter's `.grad` as soon as it is computed
frees it at once, as eager mode does.
"""

from __future__ import annotations

import torch

from remat.documents.trace import ADD_INTO
from remat.frontend.common.operators import register


def add_into(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradient of another use of a tied parameter, as autograd does: in place."""
    total.add_(gradient)


register(ADD_INTO, add_into)


def accumulate(parameter: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add `gradient` into `parameter.grad` and return None; or return it for autograd to deal with
    where somebody else must see it (hooks, `torch.autograd.grad`, no `.grad` yet)."""
    if parameter is None:
        return gradient
    existing = parameter.grad
    if (
        existing is None
        or existing.dtype != gradient.dtype
        or existing.layout is not torch.strided
        or parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ):
        return gradient
    existing.add_(gradient)
    return None


def destination(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter if the running backward would accumulate into its `.grad`, None if not (it
    collects for `torch.autograd.grad`, say). Asked before the graph runs, which is below autograd.
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:
        return None
