"""Kernels that look at the grad mode: oneDNN's LSTM layer makes its workspace, which its backward
needs, only where gradients are enabled. The step's graphs run without; these operations do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NEEDS_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})


def with_grad_mode(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `operation` with gradients enabled on tensors that need none, so that nothing is
    recorded."""
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.enable_grad():
        return operation(*detached, **kwargs)
