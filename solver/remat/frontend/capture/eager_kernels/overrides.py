"""Captures of what eager mode runs, where torch's own capture takes something else.

torch traces a step under its Python dispatcher, which asks each operator for a kernel in Python
before it takes the one of eager mode. For the length of a capture some operators get one of ours
there. Nothing else sees them: eager mode does without that dispatcher.

A step for a GPU that is not here is captured on tensors of the CPU. Then the operators get what
eager mode runs on that GPU: `cuda_kernels`, and autocast of `cuda_autocast`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch._functorch.config
from torch._C import DispatchKey

from remat.frontend.capture.absent_gpu import cuda_kernels
from remat.frontend.capture.absent_gpu.cuda_autocast import (
    Kernels,
    as_on_cuda,
    autocast_dtype,
    policies,
)
from remat.frontend.capture.eager_kernels.autocast_cache import Casts
from remat.frontend.capture.eager_kernels.dropout import bernoulli_, dropout
from remat.frontend.capture.eager_kernels.slicing import sliced
from remat.frontend.common.target import Target

_CPU, _CUDA = DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA


@contextmanager
def as_eager(
    casts: Casts, target: Target | None = None, *, symbolic: bool = False
) -> Iterator[None]:
    """Within it, what is captured is what eager mode runs: dropout, random numbers in place, batch
    norm, and autocast, whose casts are kept in `casts`, and which is off in the backward.

    With a `target`, that is what it runs on that GPU, though all tensors are on the CPU. Where
    sizes are `symbolic`, that is what it runs where they are numbers."""
    aten = torch.ops.aten
    kernels: Kernels = {
        (aten.bernoulli_.float, _CPU): bernoulli_,
        (aten.bernoulli_.float, _CUDA): bernoulli_,
        (aten._to_copy.default, _CPU): casts.cast,
        (aten._to_copy.default, _CUDA): casts.cast,
        **{(operator, _CUDA): kernel for operator, kernel in cuda_kernels.HERE.items()},
    }
    if symbolic:
        kernels |= {(aten.slice.Tensor, _CPU): sliced, (aten.slice.Tensor, _CUDA): sliced}
    with ExitStack() as stack:
        if target is None:
            kernels = {**kernels, (aten.dropout.default, _CPU): dropout}
        else:
            there = cuda_kernels.elsewhere(target)
            kernels |= {(operator, _CPU): kernel for operator, kernel in there.items()}
            stack.enter_context(_without_onednn())
            if autocast_dtype() is not None:
                kernels = policies(kernels)
                stack.enter_context(as_on_cuda())
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        stack.enter_context(casts.cleared_as_eager())
        stack.enter_context(_installed(kernels))
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Its fused LSTM is for the CPU alone."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _installed(kernels: Kernels) -> Iterator[None]:
    added = [(operator, key) for operator, key in kernels if key not in operator.py_kernels]
    for operator, key in added:
        operator.py_impl(key)(kernels[operator, key])  # type: ignore[arg-type]
    try:
        yield
    finally:
        for operator, key in added:
            del operator.py_kernels[key]
            operator._dispatch_cache.clear()
