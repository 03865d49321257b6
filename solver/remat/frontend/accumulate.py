"""Gradient accumulation inside the backward graph.

Autograd gets all of a node's gradients at once, so with `.grad` already there a second full set
would live beside it. Adding each gradient into its parameter's `.grad` as soon as it is computed
frees it at once, as eager mode does.
"""

from __future__ import annotations

import torch

from remat.frontend.operators import register
from remat.trace import ADD_INTO


def add_into(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradient of another use of a tied parameter, as autograd does: in place."""
    total.add_(gradient)


register(ADD_INTO, add_into)


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add `gradient` into `parameter.grad` and return None; or return it for autograd to deal with
    where somebody else must see it (hooks, `torch.autograd.grad`, no `.grad` yet)."""
    existing = parameter.grad
    if (
        existing is None
        or existing.dtype != gradient.dtype
        or existing.layout is not torch.strided
        or parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
        or not _autograd_accumulates(parameter)
    ):
        return gradient
    existing.add_(gradient)
    return None


def _autograd_accumulates(parameter: torch.Tensor) -> bool:
    """Whether the running backward would accumulate into `.grad` (and not, say, collect for
    `torch.autograd.grad`)."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False
