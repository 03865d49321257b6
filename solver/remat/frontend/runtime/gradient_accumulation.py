"""Gradient accumulation inside the backward graph.

Autograd receives all gradients of a node at once, so where parameters have a `.grad` already, a
second full set of gradients would be live at the same time. Adding each gradient into its
parameter's `.grad` as soon as it is computed frees it at once, as eager mode does.
"""

from __future__ import annotations

import torch

from remat.documents.targets import ADD_INTO_TARGET
from remat.frontend.common.operators import register


def add_in_place(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradient of a further use of a tied parameter to `total`, as autograd does."""
    total.add_(gradient)


register(ADD_INTO_TARGET, add_in_place)


def accumulate_grad(parameter: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add `gradient` into `parameter.grad` and return None. If `.grad` is None, set it to the
    gradient, so that the next call of the same step adds to it.

    Returns the gradient instead where autograd must process it: `parameter` is None, has a `.grad`
    of another dtype, or has hooks.
    """
    if (
        parameter is None
        or parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ):
        return gradient
    existing = parameter.grad
    if existing is None:
        parameter.grad = gradient
        return None
    if existing.dtype != gradient.dtype or existing.layout is not torch.strided:
        return gradient
    existing.add_(gradient)
    return None


def accumulation_target(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter if the running backward will accumulate into its `.grad`, else None
    (for `torch.autograd.grad`, say). Must be called before the graph runs, which is below autograd.
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:
        return None
