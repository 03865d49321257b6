"""Triton's interpreter on the memory of the software GPU.

With TRITON_INTERPRET=1, Inductor's kernels run on the host. Triton copies the memory of their
arguments there and back; here they use the memory as it is. Triton's interpreter has no libdevice,
and no CUDA graphs: both are added. Its atomic operations are corrected.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from scripts.software_gpu.numbers.cuda_graphs import active_recording
from scripts.software_gpu.numbers.host_memory import host_tensor
from scripts.software_gpu.numbers.libdevice import evaluate
from torch import Tensor

_undo: list[Callable[[], None]] = []


def is_interpreted() -> bool:
    """True if Triton's kernels of this process are interpreted."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def patch() -> None:
    """Give the interpreter libdevice and the software GPU's memory. Does nothing without Triton,
    or where kernels are not interpreted."""
    if not is_interpreted():
        return
    try:
        from triton.language.extra import libdevice
        from triton.language.extra.cuda import libdevice as declarations
        from triton.runtime import interpreter
    except ImportError:
        return
    _patch_libdevice(interpreter, libdevice, declarations)
    for name in ("create_atomic_rmw", "create_atomic_cas"):
        original = getattr(interpreter.InterpreterBuilder, name)
        _replace(interpreter.InterpreterBuilder, name, _with_dense_arrays(original))
    executor = interpreter.GridExecutor
    _replace(executor, "_init_args_hst", _host_arguments)
    _replace(executor, "_restore_args_dev", lambda *arguments: None)
    _replace(executor, "__call__", _launching(executor.__call__))


def restore() -> None:
    """Undo `patch`."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, value: Any) -> None:
    original = getattr(owner, name)
    _undo.append(lambda: setattr(owner, name, original))
    setattr(owner, name, value)


def _patch_libdevice(interpreter: Any, libdevice: ModuleType, declarations: ModuleType) -> None:
    """Let each declared function of libdevice call `evaluate`."""
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic

    def interpreted(name: str, declared: Callable[..., Any]) -> Callable[..., Any]:
        def compute(
            library: str, path: str, symbol: str, handles: list[Any], result_type: Any, pure: bool
        ) -> Any:
            dtype = interpreter._get_np_dtype(result_type)
            data = evaluate(name, [np.asarray(handle.data) for handle in handles], dtype)
            return interpreter.TensorHandle(data, result_type.scalar)

        def function(*arguments: Any, _semantic: Any = None) -> Any:
            builder.create_extern_elementwise = compute
            return declared(*arguments, _semantic=semantic)

        return function

    for name in dir(libdevice):
        declared = getattr(declarations, name, None)
        if callable(declared) and not name.startswith("_"):
            _replace(libdevice, name, interpreted(name, declared))


def _with_dense_arrays(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an atomic operation whose blocks are dense in memory: Triton's reads a broadcast block
    beyond its end."""

    def operation(builder: Any, *arguments: Any) -> Any:
        return original(builder, *(_dense(argument) for argument in arguments))

    return operation


def _dense(argument: Any) -> Any:
    data = getattr(argument, "data", None)
    if not isinstance(data, np.ndarray) or data.flags.c_contiguous:
        return argument
    return dataclasses.replace(argument, data=np.ascontiguousarray(data))


def _host_arguments(
    executor: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a kernel with CPU tensors over the same memory."""
    return [_on_host(a) for a in arguments], {k: _on_host(a) for k, a in named.items()}


def _on_host(argument: Any) -> Any:
    from triton.runtime import interpreter

    if isinstance(argument, tuple):
        return interpreter._tuple_create(argument, map(_on_host, argument))
    if isinstance(argument, interpreter.TensorDescriptor):
        return interpreter.TensorDescriptor(
            _on_host(argument.base), argument.shape, argument.strides, argument.block_shape,
            argument.padding, argument.round_f32_to_tf32,
        )  # fmt: skip
    if not hasattr(argument, "data_ptr"):
        return argument
    tensor = host_tensor(interpreter._unwrap_tensor(argument))
    return interpreter._rewrap_tensor(tensor, original_tensor=argument)


def _launching(original: Callable[..., None]) -> Callable[..., None]:
    """Return the method that runs a kernel, or records it while a CUDA graph is captured."""

    def launch(executor: Any, *arguments: Any, **named: Any) -> None:
        recording = active_recording()
        if recording is None:
            run(executor, *arguments, **named)
            return
        values, named_values = _host_arguments(executor, arguments, named)
        tensors = [a for a in (*arguments, *named.values()) if isinstance(a, Tensor)]
        recording.append(functools.partial(run, executor, *values, **named_values), tensors)

    def run(executor: Any, *arguments: Any, **named: Any) -> None:
        with np.errstate(all="ignore"):
            original(executor, *arguments, **named)

    return launch
