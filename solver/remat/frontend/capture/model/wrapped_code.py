"""Checkpoints and compiled code in a model: a capture runs the code that they wrap.

What to recompute is remat's decision; a checkpoint in the model's code would fix a worse one. A
capture only notes which operators each checkpoint runs (`CheckpointCall`). A compiler's output is
not a graph of operators.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    noop_context_fn,
)

from remat.frontend.common.garbage_collection import ProcessChange
from remat.frontend.common.torch_modes import attributes_set

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.14
    _GENERATOR = f"{_GENERATOR}_impl"
"""The function of torch that runs a checkpoint without `use_reentrant`."""


@dataclass(frozen=True, eq=False)
class CheckpointCall:
    """A call of `torch.utils.checkpoint` in the model's code, the outermost one if they are nested.

    `policy` decides which results of operators it saves, for selective checkpoints; None if it
    saves none.
    """

    policy: Callable[..., Any] | None = None

    def saves(self, func: OpOverload, args: Any, kwargs: Any, result: object) -> bool:
        """True if the checkpoint saves this result of an operator."""
        if self.policy is None or func in torch.utils.checkpoint.SAC_IGNORED_OPS:
            return False
        context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
        answer = self.policy(context, func, *args, **kwargs)
        return answer is True or answer in _SAVING_POLICIES


_SAVING_POLICIES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


ContextFunction = Callable[[], tuple[Any, Any]]
"""The option `context_fn` of `torch.utils.checkpoint`."""


class _CheckpointingThreadState(threading.local):
    is_disabled = False
    call: CheckpointCall | None = None
    context_functions: list[ContextFunction] | None = None
    """The `context_fn` of selective checkpoints so far; None if their policies are not run."""


_thread_state = _CheckpointingThreadState()


def current_checkpoint() -> CheckpointCall | None:
    """Return the checkpoint of the model's code whose function runs in this thread; None outside of
    checkpoints."""
    return _thread_state.call


@contextmanager
def selective_policies_run() -> Iterator[list[ContextFunction]]:
    """Within the context, in this thread, captures run the policies of selective checkpoints. Yield
    the list of their `context_fn`, to which each such checkpoint adds.

    A plan does not depend on the policies, and must not fail for them: they are the user's code,
    which may count its calls or read values."""
    functions: list[ContextFunction] = []
    with attributes_set((_thread_state, "context_functions", functions)):
        yield functions


@contextmanager
def _call_in_force(context_fn: ContextFunction = noop_context_fn) -> Iterator[None]:
    """Within the context, `current_checkpoint` returns this call. `context_fn` is called for the
    policy of a selective checkpoint if policies are run (`selective_policies_run`); its contexts
    are not entered."""
    if _thread_state.call is not None:
        yield
        return
    policy, functions = None, _thread_state.context_functions
    if context_fn is not noop_context_fn and functions is not None:
        functions.append(context_fn)
        policy = getattr(context_fn()[0], "policy_fn", None)
    call = CheckpointCall(policy)
    with attributes_set((_thread_state, "call", call)):
        yield


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

    signature = inspect.signature(generator)

    def patched_generator(*args: object, **kwargs: object) -> Iterator[None]:
        if _thread_state.is_disabled:
            arguments = signature.bind(*args, **kwargs).arguments
            with _call_in_force(arguments.get("context_fn", noop_context_fn)):
                yield
        else:
            yield from generator(*args, **kwargs)

    def patched_apply(function: Callable[..., Any], preserve_rng: bool, *args: object) -> object:
        if _thread_state.is_disabled:
            with _call_in_force():
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
