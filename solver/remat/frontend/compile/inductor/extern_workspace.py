"""Measured workspace of extern kernels, in the layouts that Inductor selects.

The FX graph does not have these layouts (convolutions become channels-last), and what an extern
kernel allocates inside depends on them: torch 2.11's convolution backward copies a gradient in one
layout and not in another. So each distinct call runs once, on zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._inductor.ir import ExternKernelAlloc, ExternKernelOut, FallbackKernel, IRNode
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.costs.timers import output_storage_bytes
from remat.frontend.memory.meter import allocated_peak, cuda_peak

_measured_bytes: dict[str, int] = {}
"""The workspace of each call that was measured, by operator and arguments."""


def extern_workspace_bytes(kernel: object) -> int | None:
    """Return the bytes that an extern kernel allocates only while it runs, its outputs excluded.

    None where it cannot be run standalone: it mutates an argument, a size is symbolic, or memory
    is insufficient.
    """
    try:
        call = _extern_call(kernel)
        if call is None:
            return None
        key = repr((str(call.operator), tree_map(_argument_key, (call.args, call.kwargs))))
        if key not in _measured_bytes:
            _measured_bytes[key] = _measure(call)
        return _measured_bytes[key]
    except Exception:  # a call on zeros may raise anything; then the planned workspace counts
        return None


class _ExternCall(NamedTuple):
    """An ATen operator with Inductor's IR nodes as arguments."""

    operator: OpOverload
    args: Any
    kwargs: dict[str, Any]


def _extern_call(kernel: object) -> _ExternCall | None:
    operator = getattr(kernel, "op_overload", None)
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    if isinstance(kernel, FallbackKernel) and not operator._schema.is_mutable:
        args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
        return _ExternCall(operator, args, dict(kwargs))
    if operator is torch.ops.aten.convolution.default and isinstance(kernel, ExternKernelAlloc):
        return _ExternCall(operator, (*kernel.inputs, *kernel.constant_args), {**kernel.kwargs})
    # A float32 matmul allocates nothing from torch on CPUs; on GPUs the planned workspace counts.
    out: Any = kernel
    if isinstance(out, ExternKernelOut) and _is_half_precision_on_cpu(out):
        args, kwargs = (*out.inputs, *out.constant_args), {**out.kwargs, "out": out}
        return _ExternCall(operator, args, kwargs)
    return None


def _is_half_precision_on_cpu(kernel: Any) -> bool:
    device = kernel.get_device()
    half_precision = (torch.bfloat16, torch.float16)
    return device is not None and device.type == "cpu" and kernel.get_dtype() in half_precision


def _argument_key(item: object) -> object:
    if not isinstance(item, IRNode):
        return item
    return (str(item.get_device()), item.get_dtype(), *_layout(item))


def _layout(item: Any) -> tuple[list[int], list[int]]:
    return [int(n) for n in item.get_size()], [int(n) for n in item.get_stride()]


def _zeros_like(item: object) -> object:
    """Return zeros in the layout of an IR node, and other arguments unchanged."""
    if not isinstance(item, IRNode):
        return item
    size, stride = _layout(item)
    tensor = torch.empty_strided(size, stride, dtype=item.get_dtype(), device=item.get_device())
    return tensor.zero_()


def _measure(call: _ExternCall) -> int:
    """Run a call and return the peak of its allocations, its outputs excluded."""
    items = tree_leaves((call.args, call.kwargs))
    device = next(x.get_device() for x in items if isinstance(x, IRNode))
    assert device is not None
    with isolated_modes(device):
        args, kwargs = tree_map(_zeros_like, (call.args, call.kwargs))
        run: Callable[[], object] = lambda: call.operator(*args, **kwargs)  # noqa: E731
        sizes = () if "out" in kwargs else output_storage_bytes(run())
        if device.type == "cuda":
            allocated_before = torch.cuda.memory_allocated(device)
            peak = cuda_peak(run, device) - allocated_before
        else:
            peak = allocated_peak(run)
    return max(0, peak - sum(sizes))
