"""Checkpoints and compiled code in a model: a capture runs the code that they wrap.

What to recompute is remat's decision; a checkpoint in the model's code would fix a worse one. A
compiler's output is not a graph of operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.14
    _GENERATOR = f"{_GENERATOR}_impl"
"""The function of torch that runs a checkpoint without `use_reentrant`."""


class _ThreadState(threading.local):
    is_disabled = False


_thread_state = _ThreadState()
_lock = threading.Lock()
_patch_users = 0
"""The number of contexts that need the patch, in all threads."""
_originals: tuple[Callable[..., Any], Callable[..., Any]] | None = None


@contextmanager
def checkpointing_disabled() -> Iterator[None]:
    """Within the context, in this thread, `torch.utils.checkpoint` only calls its function."""
    with _torch_patched(), _disabled_set_to(True):
        yield


@contextmanager
def checkpointing_enabled() -> Iterator[None]:
    """Within the context, in this thread, `torch.utils.checkpoint` works normally, also inside of
    `checkpointing_disabled`. Remat's own checkpoints need it."""
    with _disabled_set_to(False):
        yield


@contextmanager
def _disabled_set_to(is_disabled: bool) -> Iterator[None]:
    before, _thread_state.is_disabled = _thread_state.is_disabled, is_disabled
    try:
        yield
    finally:
        _thread_state.is_disabled = before


@contextmanager
def _torch_patched() -> Iterator[None]:
    """Patch torch's two checkpoint functions for as long as any thread is in this context."""
    global _patch_users, _originals
    module = torch.utils.checkpoint
    with _lock:
        if not _patch_users:
            _originals = getattr(module, _GENERATOR), module.CheckpointFunction.apply
            _patch_torch(*_originals)
        _patch_users += 1
    try:
        yield
    finally:
        with _lock:
            _patch_users -= 1
            if not _patch_users:
                assert _originals is not None
                _set_torch_functions(*_originals)


def _patch_torch(generator: Callable[..., Any], apply: Callable[..., Any]) -> None:
    """Replace torch's checkpoint functions by ones that obey the flag of their thread."""

    def patched_generator(*args: object, **kwargs: object) -> Iterator[None]:
        if _thread_state.is_disabled:
            yield
        else:
            yield from generator(*args, **kwargs)

    def patched_apply(function: Callable[..., Any], preserve_rng: bool, *args: object) -> object:
        if _thread_state.is_disabled:
            return function(*args)
        return apply(function, preserve_rng, *args)

    _set_torch_functions(patched_generator, patched_apply)


def _set_torch_functions(generator: Callable[..., Any], apply: Callable[..., Any]) -> None:
    module: Any = torch.utils.checkpoint
    setattr(module, _GENERATOR, generator)
    module.CheckpointFunction.apply = apply


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile(module)`; any other module unchanged."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model


@contextmanager
def compiled_code_run_eagerly() -> Iterator[None]:
    """Within the context, run compiled functions and modules, at any depth, as they were written: a
    compiler's output is not a graph of operators."""
    with (
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
