"""Overrides of operators during a capture, where it would differ from eager mode.

A step is recorded under torch's Python dispatcher, which calls an operator's Python kernel, if
there is one, instead of its C++ kernel. During a capture, remat registers Python kernels for some
operators. Nothing else sees them: eager mode does not use the Python dispatcher.

A step for an absent GPU is captured on CPU tensors. The operators then get kernels that call what
eager mode runs on that GPU (`cuda_kernels`), and CUDA's autocast policies (`autocast`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.autocast import (
    AutocastCache,
    PythonKernels,
    cuda_autocast_on_cpu,
    target_autocast_dtype,
    with_cuda_autocast,
)
from remat.frontend.capture.eager_kernels.cuda_kernels import CUDA_KERNELS, absent_gpu_kernels
from remat.frontend.capture.eager_kernels.flash_attention import flash_attention_captured
from remat.frontend.capture.eager_kernels.flex_attention import flex_attention_captured
from remat.frontend.capture.eager_kernels.sampling import (
    bernoulli_in_place_kernel,
    cpu_dropout_kernel,
    normal_in_place_kernel,
    random_integers_in_place_kernel,
    random_integers_kernel,
    rrelu_with_noise_kernel,
    rrelu_with_noise_out_kernel,
)
from remat.frontend.common.target_gpu import TargetGpu

Tensor = torch.Tensor
Kernel = Callable[..., tuple[Tensor, ...]]

_aten = torch.ops.aten

RECURRENT_OPERATORS: tuple[OpOverload, ...] = (
    _aten.gru.input,
    _aten.lstm.input,
    _aten.rnn_relu.input,
    _aten.rnn_tanh.input,
)


def layerwise_recurrent_kernel(operator: OpOverload) -> Kernel:
    """Return the kernel that replaces a recurrent operator on the CPU: it calls one layer at a
    time, with `aten.dropout` between layers."""
    decomposition = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def kernel(
        x: Tensor,
        state: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        options = (train, bidirectional)
        if not _has_dropout_between_layers(num_layers, dropout, train):
            return decomposition(
                x, state, weights, has_biases, num_layers, 0.0, *options, batch_first
            )
        states = [state] if isinstance(state, Tensor) else list(state)
        num_weights, num_states = len(weights) // num_layers, 2 if bidirectional else 1
        x = x.transpose(0, 1) if batch_first else x
        last_states: list[list[Tensor]] = [[] for _ in states]
        for layer in range(num_layers):
            layer_states = [s.narrow(0, layer * num_states, num_states) for s in states]
            x, *new_states = decomposition(
                x if layer == 0 else _aten.dropout.default(x, dropout, True),
                layer_states[0] if isinstance(state, Tensor) else layer_states,
                weights[layer * num_weights : (layer + 1) * num_weights],
                has_biases, 1, 0.0, *options, False,
            )  # fmt: skip
            for collected, new_state in zip(last_states, new_states, strict=True):
                collected.append(new_state)
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.cat(collected) for collected in last_states))

    return kernel


def recurrent_kernel_without_dropout(operator: OpOverload) -> Kernel:
    """Return the kernel that replaces a recurrent operator on a GPU: it raises `TraceError` if
    there is dropout between layers."""
    decomposition = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def kernel(*args: Any) -> tuple[Tensor, ...]:
        num_layers, dropout, train = args[4:7]
        if _has_dropout_between_layers(num_layers, dropout, train):
            raise TraceError(
                f"a recurrent network of {num_layers} layers with dropout between them runs in "
                "cuDNN, whose random numbers a plan cannot repeat; use one module per layer with "
                "nn.Dropout between them, or set its dropout to 0"
            )
        return decomposition(*args)

    return kernel


def _has_dropout_between_layers(num_layers: int, dropout: float, train: bool) -> bool:
    return train and dropout > 0 and num_layers > 1


def symbolic_slice_kernel(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> torch.Tensor:
    """Replace `aten.slice` in a symbolic capture: return `x` itself if the slice has a whole
    symbolic dimension."""
    size: Any = x.shape[dim]
    if isinstance(size, torch.SymInt) and _is_whole_slice(size, start, end, step):
        return x
    with torch._C._DisablePythonDispatcher():
        return _aten.slice.Tensor(x, dim, start, end, step)


def _is_whole_slice(size: torch.SymInt, start: Any, end: Any, step: Any) -> bool:
    if isinstance(start, torch.SymInt) or start not in (None, 0) or step != 1:
        return False
    if isinstance(end, torch.SymInt):
        return bool(end.node.expr == size.node.expr)
    return end is None or end == sys.maxsize


def torch_kernel(operator: OpOverload) -> Kernel:
    """Return the kernel that calls torch's C++ kernel of an operator, as eager mode does: the
    Python kernel computes the same with other operators."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return operator(*args, **kwargs)

    return kernel


def gpu_dropout_kernel(x: Tensor, p: float, train: bool) -> Tensor:
    """Replace `aten.dropout` on a GPU. Return `x` itself outside of training, and for p = 0: the
    Python kernel clones it."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return _aten.native_dropout.default(x, p, train)[0]


_CPU, _CUDA = DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA

_DECOMPOSED = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
"""Operators that torch's Python kernels decompose, unlike eager mode."""

_KERNELS: Mapping[OpOverload, Callable[..., Any]] = {
    _aten.bernoulli_.float: bernoulli_in_place_kernel,
    getattr(_aten.random, "from"): random_integers_kernel,
    getattr(_aten.random_, "from"): random_integers_in_place_kernel,
    _aten.rrelu_with_noise.out: rrelu_with_noise_out_kernel,
    **{
        operator: torch_kernel(operator)
        for name in _DECOMPOSED
        for packet in [getattr(_aten, name)]
        for operator in (getattr(packet, overload) for overload in packet.overloads())
        if {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd} & {*operator.py_kernels}
    },
}
"""Kernels for tensors on any device."""

_ON_CPU: Mapping[OpOverload, Callable[..., Any]] = {
    _aten.dropout.default: cpu_dropout_kernel,
    _aten.normal_.default: normal_in_place_kernel,
    _aten.rrelu_with_noise.default: rrelu_with_noise_kernel,
    **{operator: layerwise_recurrent_kernel(operator) for operator in RECURRENT_OPERATORS},
}
"""Kernels for tensors that are really on the CPU."""

_ON_GPU: Mapping[OpOverload, Callable[..., Any]] = {
    _aten.dropout.default: gpu_dropout_kernel,
    **{op: recurrent_kernel_without_dropout(op) for op in RECURRENT_OPERATORS},
}
"""Kernels for tensors on a GPU, present or absent."""


@contextmanager
def eager_kernel_overrides(
    autocast_cache: AutocastCache, target: TargetGpu | None = None, *, symbolic: bool = False
) -> Iterator[None]:
    """Within the context, a capture records the operators that eager mode runs: dropout, in-place
    sampling, batch norm, and autocast with its weight cache.

    With a `target`, these are the operators of that absent GPU, although all tensors are on the
    CPU. Use `symbolic` if the capture has symbolic sizes.
    """
    anywhere = {**_KERNELS, _aten._to_copy.default: autocast_cache.to_copy}
    if symbolic:
        anywhere[_aten.slice.Tensor] = symbolic_slice_kernel
    kernels: PythonKernels = {
        **_kernels_for_dispatch_key(anywhere, _CPU),
        **_kernels_for_dispatch_key({**anywhere, **CUDA_KERNELS, **_ON_GPU}, _CUDA),
    }
    with ExitStack() as stack:
        if target is None:
            kernels = {**kernels, **_kernels_for_dispatch_key(_ON_CPU, _CPU)}
        else:
            kernels = {
                **kernels,
                **_kernels_for_dispatch_key({**absent_gpu_kernels(target), **_ON_GPU}, _CPU),
            }
            stack.enter_context(_onednn_disabled())
            stack.enter_context(flex_attention_captured())
            stack.enter_context(flash_attention_captured())
            if target_autocast_dtype() is not None:
                kernels = with_cuda_autocast(kernels)
                stack.enter_context(cuda_autocast_on_cpu())
        stack.enter_context(autocast_cache.cleared_with_torch_cache())
        stack.enter_context(kernels_registered(kernels))
        yield


def _kernels_for_dispatch_key(
    kernels: Mapping[OpOverload, Callable[..., Any]], key: DispatchKey
) -> PythonKernels:
    return {(operator, key): kernel for operator, kernel in kernels.items()}


@contextmanager
def _onednn_disabled() -> Iterator[None]:
    """Disable oneDNN within the context: its fused LSTM exists on the CPU alone."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


@contextmanager
def kernels_registered(kernels: PythonKernels) -> Iterator[None]:
    """Register kernels in the Python dispatcher within the context. An operator that has a Python
    kernel for the key already keeps it."""
    added = [(operator, key) for operator, key in kernels if key not in operator.py_kernels]
    for operator, key in added:
        operator.py_impl(key)(kernels[operator, key])  # type: ignore[arg-type]
    try:
        yield
    finally:
        for operator, key in added:
            del operator.py_kernels[key]
            operator._dispatch_cache.clear()
