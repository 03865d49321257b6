"""Context managers for torch's modes: autocast, the grad mode, all others at once, and attributes.

Some kernels depend on the grad mode: oneDNN's LSTM layer creates its workspace, which its backward
needs, only where gradients are enabled. The step's graphs run with gradients disabled, except for
these operations (`NEEDS_GRAD_MODE`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

AUTOCAST_DEVICES = ("cpu", "cuda")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of autocast by name."""

NEEDS_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""The operations that have to run with gradients enabled."""


@contextmanager
def attributes_set(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Within the context, attributes have other values. `settings` are triples of an owner, a name
    and a value."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def autocast_to(device: str, dtype: str | None) -> AbstractContextManager[object]:
    """Return `torch.autocast` for a device such as "cuda:0" and the name of a dtype; for None a
    context that leaves autocast as it is.

    Raises `KeyError` for a name that is not in `DTYPES`.
    """
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.partition(":")[0], dtype=DTYPES[dtype])


def run_with_grad_mode(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `operation` with gradients enabled, on detached positional tensors, so that autograd
    records nothing."""
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.enable_grad():
        return operation(*detached, **kwargs)


def autocast_modes() -> tuple[str, ...]:
    """Return the enabled autocast modes, such as "cpu:bfloat16"."""
    return tuple(
        f"{device}:{dtype_name(torch.get_autocast_dtype(device))}"
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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


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
def checkpoints_suspended() -> Iterator[None]:
    """Within the context, suspend the user's checkpoint around a call: its saved-tensor hooks and
    the dispatch modes of selective checkpointing."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    hooks: list[Any] = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    modes = _get_current_dispatch_mode_stack()
    is_checkpoint = [type(mode).__module__ == "torch.utils.checkpoint" for mode in modes]
    first = is_checkpoint.index(True) if any(is_checkpoint) else len(modes)
    for _ in modes[first:]:
        _pop_mode()
    others = [m for m, skip in zip(modes[first:], is_checkpoint[first:], strict=True) if not skip]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes[first:]:
            _push_mode(mode)
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def capture_paused() -> Iterator[None]:
    """Within the context, operations are not part of a running capture: they compute on real or
    meta tensors."""
    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(functionalize), _disable_current_modes():
        yield
