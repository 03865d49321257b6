"""What calls of libraries hold only while they run, in the layouts that Inductor chose.

The FX graph does not know these layouts (convolutions become channels-last), and what a library
allocates inside of a call depends on them: torch 2.11's backward of convolutions copies a gradient
in one layout and not in another. So each distinct call is run once, on zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._inductor.ir import ExternKernelOut, FallbackKernel, IRNode
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from remat.frontend.costs.operations import alone
from remat.frontend.costs.timers import output_bytes
from remat.frontend.memory.allocator_peak import allocated_peak, cuda_peak

_known: dict[str, int] = {}


def scratch_bytes(kernel: object) -> int | None:
    """Of a call in Inductor's schedule: what the allocator gives out meanwhile, beyond its results.
    None where it cannot be run by itself: it changes something, its sizes are symbols, the memory
    is not there."""
    try:
        call = _call_of(kernel)
        if call is None:
            return None
        key = repr((str(call.operator), tree_map(_described, (call.args, call.kwargs))))
        if key not in _known:
            _known[key] = _measured(call)
        return _known[key]
    except Exception:  # whatever a call raises that is made up, the planned workspace counts
        return None


class _Call(NamedTuple):
    operator: OpOverload
    args: Any
    kwargs: dict[str, Any]


def _call_of(kernel: object) -> _Call | None:
    operator = getattr(kernel, "op_overload", None)
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    if isinstance(kernel, FallbackKernel) and not operator._schema.is_mutable:
        args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
        return _Call(operator, args, dict(kwargs))
    # In float32, products take nothing from torch's allocator; on GPUs, what was measured counts.
    out: Any = kernel
    if isinstance(out, ExternKernelOut) and _is_short_on_cpu(out):
        return _Call(operator, (*out.inputs, *out.constant_args), {**out.kwargs, "out": out})
    return None


def _is_short_on_cpu(kernel: Any) -> bool:
    device = kernel.get_device()
    short = (torch.bfloat16, torch.float16)
    return device is not None and device.type == "cpu" and kernel.get_dtype() in short


def _described(item: object) -> object:
    if not isinstance(item, IRNode):
        return item
    return (str(item.get_device()), item.get_dtype(), *_layout(item))


def _layout(item: Any) -> tuple[list[int], list[int]]:
    return [int(n) for n in item.get_size()], [int(n) for n in item.get_stride()]


def _made(item: object) -> object:
    if not isinstance(item, IRNode):
        return item
    size, stride = _layout(item)
    made = torch.empty_strided(size, stride, dtype=item.get_dtype(), device=item.get_device())
    return made.zero_()


def _measured(call: _Call) -> int:
    items = tree_leaves((call.args, call.kwargs))
    device = next(x.get_device() for x in items if isinstance(x, IRNode))
    assert device is not None
    with alone(device):
        args, kwargs = tree_map(_made, (call.args, call.kwargs))
        run: Callable[[], object] = lambda: call.operator(*args, **kwargs)  # noqa: E731
        sizes = [] if "out" in kwargs else output_bytes(run())
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            peak = cuda_peak(run, device) - before
        else:
            peak = allocated_peak(run)
    return max(0, peak - sum(sizes))
