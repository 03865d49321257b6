"""Autocast in a capture: eager mode's weight cache, and CUDA's policies on CPU tensors.

**Weight cache.** Under autocast, eager mode casts each parameter once, however often it is used,
and sums the gradients of those uses in the lower precision. Torch's cache is off during a capture,
since it would take any input for a parameter. Without `AutocastCache`, each use would be cast, as
many copies stored, and the gradients summed in float32.

**CUDA's policies**, for captures of steps on an absent GPU. Autocast casts other operators on CUDA
than on the CPU. Torch's dispatcher lists the operators that have an autocast kernel, but not their
policies. Those are in the tables of aten/src/ATen/autocast_mode.h, whose names are used here;
nearly all operators that are not listed below have the policy "fp32". During such a capture,
autocast is enabled for the CPU, and the operators get CUDA's policies in torch's Python dispatcher
(see `overrides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload, resolve_key
from torch.utils._pytree import tree_leaves, tree_map

from remat.frontend.common.torch_modes import attributes_set

_to_copy = torch.ops.aten._to_copy.default


class AutocastCache:
    """The casts that autocast makes in one captured forward, by tensor and dtype."""

    def __init__(self) -> None:
        # Read here, because the capture turns torch's cache off.
        self._is_enabled = torch.is_autocast_cache_enabled()
        self._leaves: dict[int, tuple[torch.Tensor, int]] = {}
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def start_forward(self, leaf_groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Clear the cache for a new forward, and set the tensors whose casts it stores: parameters
        and those inputs that are leaves of autograd. Tensors of one group share their casts (tied
        weights)."""
        self._leaves = {
            id(tensor): (tensor, index)
            for index, group in enumerate(leaf_groups)
            for tensor in group
        }
        self._casts.clear()

    def to_copy(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Replace `aten._to_copy`: if autocast casts a parameter or input, return the cached cast.
        Any other call runs torch's operator."""
        _, leaf = self._leaves.get(id(x), (x, -1))
        dtype = kwargs.get("dtype")
        if dtype is None or leaf < 0 or not (self._is_enabled and _is_autocast_cast(x, dtype)):
            return _uncached_to_copy(x, **kwargs)
        if (leaf, dtype) not in self._casts:
            self._casts[leaf, dtype] = _uncached_to_copy(x, **kwargs)
        return self._casts[leaf, dtype]

    def cleared_with_torch_cache(self) -> AbstractContextManager[None]:
        """Return a context in which this cache is also cleared when torch clears its own, which it
        does at the end of the outermost autocast region."""
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._casts.clear()
            clear()

        return attributes_set((torch, "clear_autocast_cache", clear_both))


def _is_autocast_cast(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if autocast makes this cast, and not the model. Autocast's kernels cast while autocast
    is off, inside of a region where it is on; the model's casts there run while it is on."""
    device = x.device.type
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        x.requires_grad
        and x.dtype == torch.float32
        and dtype == torch.get_autocast_dtype(device)
        and depth > 0
        and not torch.is_autocast_enabled(device)
    )


def _uncached_to_copy(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run torch's `aten._to_copy`, without the cache."""
    with torch._C._DisablePythonDispatcher():
        return _to_copy(x, **kwargs)


PythonKernel: TypeAlias = Callable[..., Any]
PythonKernels: TypeAlias = Mapping[tuple[OpOverload, DispatchKey], PythonKernel | DispatchKey]
"""Kernels to register in torch's Python dispatcher, by operator and dispatch key. A `DispatchKey`
in place of a kernel redirects the call to that key."""

_LOWER_PRECISION = frozenset(
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
"""Policy "lower_precision_fp": operators that run in autocast's dtype."""

_FP32_SET_OPT_DTYPE = frozenset(
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
"""Policy "fp32_set_opt_dtype": operators with a `dtype` argument, whose default becomes float32."""

_norm = torch.ops.aten.norm
_FP32_APPEND_DTYPE: dict[str, tuple[OpOverload, PythonKernel]] = {
    "norm.Scalar": (_norm.ScalarOpt_dtype, _norm.ScalarOpt_dtype),
    "norm.ScalarOpt_dim": (_norm.ScalarOpt_dim_dtype, _norm.ScalarOpt_dim_dtype),
}
"""Policy "fp32_append_dtype": the overload with a `dtype` argument that replaces an operator."""

_PROMOTED = frozenset(
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
"""Policy "promote": operators that run in the widest dtype of their operands."""

_BANNED = frozenset({"binary_cross_entropy"})
"""Operators that are unsafe under autocast: torch raises an error."""

_AUTOCAST_KEY, _AUTOGRAD_KEY = DispatchKey.AutocastCPU, DispatchKey.AutogradCPU


def with_cuda_autocast(kernels: PythonKernels) -> PythonKernels:
    """Return `kernels` for CPU tensors, with kernels that apply CUDA's autocast before them."""
    cpu_names = _operators_with_kernel_for("AutocastCPU")
    cuda_names = _operators_with_kernel_for("AutocastCUDA")
    combined: dict[tuple[OpOverload, DispatchKey], PythonKernel | DispatchKey] = dict(kernels)
    for name in cuda_names:
        if (operator := _aten_operator(name)) is None:
            continue
        if name in cpu_names:
            combined[operator, _AUTOCAST_KEY] = _autocast_kernel(name, operator, operator)
        else:
            # The CPU's autocast skips this operator, so autograd is the first key to be called.
            after = kernels.get((operator, _AUTOGRAD_KEY)) or _kernel_after_autocast(operator)
            combined[operator, _AUTOGRAD_KEY] = _autocast_kernel(
                name, operator, _kernel_as_callable(operator, after)
            )
    for name in cpu_names - cuda_names:
        if (operator := _aten_operator(name)) is not None:
            # CUDA has no policy for it: skip autocast.
            combined[operator, _AUTOCAST_KEY] = _kernel_after_autocast(operator)
    return combined


@contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Within the context, enable CPU autocast with the dtype of `target_autocast_dtype()`, or
    disable it if that is None."""
    target_dtype = target_autocast_dtype()
    was_enabled = torch.is_autocast_enabled("cpu")
    dtype_before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", target_dtype is not None)
    torch.set_autocast_dtype("cpu", target_dtype or dtype_before)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cpu", was_enabled)
        torch.set_autocast_dtype("cpu", dtype_before)


def target_autocast_dtype() -> torch.dtype | None:
    """Return the autocast dtype of a step on an absent GPU, or None without autocast: the dtype for
    CUDA if autocast is enabled there, else for the CPU, since a torch without CUDA cannot enable
    autocast for CUDA."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _operators_with_kernel_for(key: str) -> set[str]:
    """Return the names, without "aten::", of the operators that have a kernel for a dispatch
    key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _aten_operator(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _kernel_after_autocast(operator: OpOverload) -> PythonKernel | DispatchKey:
    """Return the kernel that a capture on the CPU calls for an operator after autocast."""
    key = resolve_key(operator, _AUTOGRAD_KEY)
    return operator.py_kernels.get(key, key)


def _kernel_as_callable(operator: OpOverload, kernel: PythonKernel | DispatchKey) -> PythonKernel:
    if isinstance(kernel, DispatchKey):
        return partial(operator._op_dk, kernel)
    return kernel


def _autocast_kernel(name: str, operator: OpOverload, inner: PythonKernel) -> PythonKernel:
    """Return an autocast kernel for an operator: it casts the arguments by CUDA's policy and calls
    `inner`, the kernel after autocast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return inner(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_AUTOCAST_KEY)):
            first = args[0] if args else None
            if name in _BANNED:
                raise RuntimeError(
                    f"{name} is unsafe under autocast; use {name}_with_logits on the logits"
                )
            if name in _FP32_SET_OPT_DTYPE and not _is_eligible_for_autocast(first):
                return inner(*args, **kwargs)
            if name in _FP32_SET_OPT_DTYPE or name in _FP32_APPEND_DTYPE:
                dtype = torch.float32 if _is_eligible_for_autocast(first) else args[0].dtype
                overload, call = _FP32_APPEND_DTYPE.get(name, (operator, inner))
                positional, keywords = _arguments_with_default_dtype(overload, args, kwargs, dtype)
                return call(*positional, **keywords)
            cast_dtype = torch.float32
            if name in _LOWER_PRECISION:
                cast_dtype = torch.get_autocast_dtype("cpu")
            elif name in _PROMOTED:
                cast_dtype = _promoted_autocast_dtype((args, kwargs))
            cast_args, cast_kwargs = _cast_arguments_for_autocast(
                operator, args, kwargs, cast_dtype
            )
            return inner(*cast_args, **cast_kwargs)

    return kernel


def _is_eligible_for_autocast(item: object) -> bool:
    """True for tensors that autocast casts: floating-point ones narrower than float64."""
    return (
        isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype != torch.float64
    )


def _cast_for_autocast(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if _is_eligible_for_autocast(item) and item.dtype != dtype else item


def _cast_arguments_for_autocast(
    operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator, with tensors that autocast casts in `dtype`. They are
    cast from the last one to the first. Torch casts them in the argument list of a C++ call, and
    GCC, which builds torch for Linux, evaluates that backwards; it casts the tensors of a list in
    their order."""
    order = [a.name for a in operator._schema.arguments]
    keywords = sorted(kwargs, key=order.index, reverse=True)
    cast_kwargs = {
        k: tree_map(lambda item: _cast_for_autocast(item, dtype), kwargs[k]) for k in keywords
    }
    cast_args = [
        tree_map(lambda item: _cast_for_autocast(item, dtype), arg) for arg in reversed(args)
    ]
    return tuple(reversed(cast_args)), {k: cast_kwargs[k] for k in kwargs}


def _promoted_autocast_dtype(arguments: object) -> torch.dtype:
    tensors = [item for item in tree_leaves(arguments) if _is_eligible_for_autocast(item)]
    has_float32 = any(tensor.dtype == torch.float32 for tensor in tensors)
    return torch.float32 if has_float32 else torch.get_autocast_dtype("cpu")


def _arguments_with_default_dtype(
    operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments for `operator`, with this `dtype` if theirs is
    None."""
    schema = operator._schema.arguments
    values = {a.name: a.default_value for a in schema}
    values |= dict(zip(values, args, strict=False)) | dict(kwargs)
    if values["dtype"] is None:
        values["dtype"] = dtype
    positional = [values[a.name] for a in schema if not a.kwarg_only]
    return positional, {a.name: values[a.name] for a in schema if a.kwarg_only}
