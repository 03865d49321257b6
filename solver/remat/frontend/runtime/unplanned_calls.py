"""Calls that run the model's own forward: inside of a torch.func transform or a capture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

CAPTURED = "is captured by torch.jit, torch.export, torch.fx or torch.compile"
"""The reason for a call inside of a capture."""


def unplanned_reason(tensors: Sequence[torch.Tensor]) -> str:
    """Return the reason why a call with these input tensors is not planned, as text that follows
    the model's name; "" for a call that can be planned."""
    if is_in_function_transform():
        return "runs inside a transform of torch.func, which a plan does not support"
    is_traced = (
        torch._C._get_tracing_state() is not None  # of torch.jit.trace
        or torch.compiler.is_exporting()
        or get_proxy_mode() is not None
    )
    if is_traced or any(map(_is_symbolic, tensors)):
        return CAPTURED
    return ""


def is_in_function_transform() -> bool:
    """True inside of a transform of torch.func, such as `grad`, `jvp` or `vmap`."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]


def has_lazy_parameters(model: nn.Module) -> bool:
    """True if the first call of the model will initialize parameters or buffers."""
    lazy = UninitializedParameter, UninitializedBuffer
    return any(isinstance(t, lazy) for t in (*model.parameters(), *model.buffers()))


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor)
