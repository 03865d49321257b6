"""Context managers for torch's modes: autocast, the grad mode, and all others at once.

Some kernels depend on the grad mode: oneDNN's LSTM layer creates its workspace, which its backward
needs, only where gradients are enabled. The step's graphs run with gradients disabled, except for
these operations (`NEEDS_GRAD_MODE`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of autocast by name."""

NEEDS_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""The operations that have to run with gradients enabled."""


def autocast_to(device: str, dtype: str | None) -> AbstractContextManager[object]:
    """Return `torch.autocast` for a device such as "cuda:0" and the name of a dtype, without
    autocast for None.

    Raises `KeyError` for a name that is not in `DTYPES`.
    """
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.partition(":")[0], dtype=DTYPES[dtype])


def run_with_grad_mode(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `operation` with gradients enabled, on detached tensors, so that autograd records
    nothing."""
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.enable_grad():
        return operation(*detached, **kwargs)


@contextmanager
def isolated_modes(device: torch.device) -> Iterator[None]:
    """Run with no gradients, autocast or dispatch modes, and restore the RNG state afterwards."""
    devices = [device.index] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _disable_current_modes(),
    ):
        yield


@contextmanager
def capture_paused() -> Iterator[None]:
    """Within the context, operations are not part of a running capture: they compute on real or
    meta tensors."""
    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(functionalize), _disable_current_modes():
        yield
