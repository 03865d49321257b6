"""Autocast as on CUDA, for captures of its steps on tensors of the CPU.

Autocast casts other operations on CUDA than on the CPU. Which ones it has a policy for can be asked
of torch; the policy itself is in the tables of aten/src/ATen/autocast_mode.h: nearly all others are
"fp32". For the length of such a capture autocast is on for the CPU, and its operations get CUDA's
policies in torch's Python dispatcher (see `remat.frontend.capture.eager_kernels.overrides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload, resolve_key
from torch.utils._pytree import tree_leaves, tree_map

Kernel: TypeAlias = Callable[..., Any]
Kernels: TypeAlias = Mapping[tuple[OpOverload, DispatchKey], Kernel | DispatchKey]

_LOW = frozenset(
    {
        "_convolution.deprecated",
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    }
)
"""Run in the lower precision."""

_WIDE_RESULT = frozenset(
    {
        "prod",
        "prod.dim_int",
        "softmax.int",
        "log_softmax.int",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "linalg_matrix_norm.str_ord",
        "sum",
        "sum.dim_IntList",
    }
)
"""Told to return float32, where they are not told anything."""

_norm = torch.ops.aten.norm
_WIDE_NORM: dict[str, tuple[OpOverload, Kernel]] = {
    "norm.Scalar": (_norm.ScalarOpt_dtype, _norm.ScalarOpt_dtype),
    "norm.ScalarOpt_dim": (_norm.ScalarOpt_dim_dtype, _norm.ScalarOpt_dim_dtype),
}
"""The same by another overload."""

_WIDEST = frozenset(
    {
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "grid_sampler",
        "index_put",
        "tensordot",
        "scatter_add",
    }
)
"""Run in the widest precision among their operands."""

_REFUSED = frozenset({"binary_cross_entropy"})
"""Unsafe: torch raises an error."""

_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"
_KEY, _AUTOGRAD = DispatchKey.AutocastCPU, DispatchKey.AutogradCPU


def policies(kernels: Kernels) -> Kernels:
    """`kernels`, for a capture on tensors of the CPU, with CUDA's autocast before them."""
    on_cpu, on_cuda = _registered(_CPU), _registered(_CUDA)
    found: dict[tuple[OpOverload, DispatchKey], Kernel | DispatchKey] = dict(kernels)
    for name in on_cuda:
        if (operator := _operator(name)) is None:
            continue
        if name in on_cpu:
            found[operator, _KEY] = _policy(name, operator, operator)
        else:
            # Autocast has nothing for the CPU here: the first to be asked is autograd.
            behind = kernels.get((operator, _AUTOGRAD)) or _next(operator)
            found[operator, _AUTOGRAD] = _policy(name, operator, _called(operator, behind))
    for name in on_cpu - on_cuda:
        if (operator := _operator(name)) is not None:
            # CUDA has no policy: on to what comes next.
            found[operator, _KEY] = _next(operator)
    return found


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within it, autocast of the CPU casts to `autocast_dtype()`."""
    asked = autocast_dtype()
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", asked is not None)
    torch.set_autocast_dtype("cpu", asked or before[1])
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])


def autocast_dtype() -> torch.dtype | None:
    """To what a step for a GPU that is not here is cast: autocast as it is on for CUDA. A torch
    without CUDA cannot switch that on; there autocast of the CPU counts."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _next(operator: OpOverload) -> Kernel | DispatchKey:
    """What a capture on the CPU runs after autocast."""
    key = resolve_key(operator, _AUTOGRAD)
    return operator.py_kernels.get(key, key)


def _called(operator: OpOverload, kernel: Kernel | DispatchKey) -> Kernel:
    if isinstance(kernel, DispatchKey):
        return partial(operator._op_dk, kernel)
    return kernel


def _policy(name: str, operator: OpOverload, inner: Kernel) -> Kernel:
    """The kernel of autocast for an operator; `inner` is the one behind it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return inner(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            first = args[0] if args else None
            if name in _REFUSED:
                raise RuntimeError(f"autocast refuses {name}; use its form with logits")
            if name in _WIDE_RESULT and not _is_eligible(first):
                return inner(*args, **kwargs)
            if name in _WIDE_RESULT or name in _WIDE_NORM:
                dtype = torch.float32 if _is_eligible(first) else args[0].dtype
                called, behind = _WIDE_NORM.get(name, (operator, inner))
                positional, named = _told(called, args, kwargs, dtype)
                return behind(*positional, **named)
            wanted = torch.float32
            if name in _LOW:
                wanted = torch.get_autocast_dtype("cpu")
            elif name in _WIDEST:
                wanted = _widest((args, kwargs))
            cast_args, cast_kwargs = tree_map(lambda item: _cast(item, wanted), (args, kwargs))
            return inner(*cast_args, **cast_kwargs)

    return kernel


def _is_eligible(item: object) -> bool:
    return (
        isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype != torch.float64
    )


def _cast(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if _is_eligible(item) and item.dtype != dtype else item


def _widest(arguments: object) -> torch.dtype:
    tensors = [item for item in tree_leaves(arguments) if _is_eligible(item)]
    wide = any(tensor.dtype == torch.float32 for tensor in tensors)
    return torch.float32 if wide else torch.get_autocast_dtype("cpu")


def _told(
    operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for `operator`, with a dtype where none is given."""
    schema = operator._schema.arguments
    given = {a.name: a.default_value for a in schema}
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    if given["dtype"] is None:
        given["dtype"] = dtype
    positional = [given[a.name] for a in schema if not a.kwarg_only]
    return positional, {a.name: given[a.name] for a in schema if a.kwarg_only}
