"""Training flags, autocast modes and torch's version: what a capture assumes, and each call checks.

A plan is valid only for calls in the same environment (`remat.frontend.runtime.guards`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from remat.documents.records import Environment
from remat.frontend.capture.absent_gpu.cuda_autocast import target_autocast_dtype
from remat.frontend.common.target_gpu import TargetGpu

AUTOCAST_DEVICES = ("cpu", "cuda")


def current_environment(model: nn.Module, target: TargetGpu | None = None) -> Environment:
    """Return the model's training flags, the enabled autocast modes and torch's version. With a
    `target`, autocast is that of the step on this absent GPU."""
    autocast = autocast_modes()
    if target is not None:
        dtype = target_autocast_dtype()
        autocast = () if dtype is None else (f"cuda:{_dtype_name(dtype)}",)
    return Environment(
        torch=torch.__version__,
        training=model.training,
        training_exceptions=training_exceptions(model),
        autocast=autocast,
        frees_tangents=hasattr(torch.autograd.Function, "boxed_grads_call"),
    )


def training_exceptions(model: nn.Module) -> tuple[str, ...]:
    """Return the names of submodules whose `training` flag differs from the model's."""
    flag = model.training
    return tuple(name for name, module in model.named_modules() if module.training != flag)


def autocast_modes() -> tuple[str, ...]:
    """Return the enabled autocast modes, such as "cpu:bfloat16"."""
    return tuple(
        f"{device}:{_dtype_name(torch.get_autocast_dtype(device))}"
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )


@contextmanager
def autocast_set_to(modes: Sequence[str]) -> Iterator[None]:
    """Within the context, enable these autocast modes, named as by `autocast_modes`, and disable
    all others."""
    dtype_by_device = dict(mode.split(":") for mode in modes)
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if device in dtype_by_device:
                dtype = getattr(torch, dtype_by_device[device])
                stack.enter_context(torch.autocast(device, dtype, enabled=True))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def autocast_disabled() -> Iterator[None]:
    """Disable autocast within the context, to run a captured graph, which includes its casts."""
    enabled = [d for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


@contextmanager
def autocast_cache_disabled() -> Iterator[None]:
    """Within the context, autocast does not keep weights that it has cast to lower precision."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
