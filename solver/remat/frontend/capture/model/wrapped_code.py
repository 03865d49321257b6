"""Checkpoints and compiled code in a model: a capture runs the code that they wrap.

What to recompute is remat's decision; a checkpoint in the model's code would fix a worse one. A
compiler's output is not a graph of operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

from remat.frontend.common.garbage_collection import ProcessChange
from remat.frontend.common.torch_modes import attributes_set

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.14
    _GENERATOR = f"{_GENERATOR}_impl"
"""The function of torch that runs a checkpoint without `use_reentrant`."""


class _CheckpointingThreadState(threading.local):
    is_disabled = False


_thread_state = _CheckpointingThreadState()


@contextmanager
def checkpointing_disabled() -> Iterator[None]:
    """Within the context, in this thread, `torch.utils.checkpoint` only calls its function."""
    with _PATCHED.in_force(), attributes_set((_thread_state, "is_disabled", True)):
        yield


@contextmanager
def checkpointing_enabled() -> Iterator[None]:
    """Within the context, in this thread, `torch.utils.checkpoint` works normally, also inside of
    `checkpointing_disabled`. Remat's own checkpoints need it."""
    with attributes_set((_thread_state, "is_disabled", False)):
        yield


def _patch_checkpoint_functions() -> Callable[[], None]:
    """Replace torch's checkpoint functions by ones that obey the flag of their thread. Return the
    function that restores torch's."""
    module: Any = torch.utils.checkpoint
    generator, apply = getattr(module, _GENERATOR), module.CheckpointFunction.apply

    def patched_generator(*args: object, **kwargs: object) -> Iterator[None]:
        if _thread_state.is_disabled:
            yield
        else:
            yield from generator(*args, **kwargs)

    def patched_apply(function: Callable[..., Any], preserve_rng: bool, *args: object) -> object:
        if _thread_state.is_disabled:
            return function(*args)
        return apply(function, preserve_rng, *args)

    def set_functions(generator: Callable[..., Any], apply: Callable[..., Any]) -> None:
        setattr(module, _GENERATOR, generator)
        module.CheckpointFunction.apply = apply

    set_functions(patched_generator, patched_apply)
    return partial(set_functions, generator, apply)


_PATCHED = ProcessChange(_patch_checkpoint_functions)


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
