"""Patches applied to torch while remat compiles a graph. Each is undone when its context ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def non_lazy_backward() -> Iterator[None]:
    """Compile the backward together with the forward instead of at the first `backward()` call.

    Its peak is then verified before a training step runs.
    """
    from torch._functorch import config

    with config.patch(force_non_lazy_backward_lowering=True):
        yield


@contextmanager
def separate_cpu_kernel_calls() -> Iterator[None]:
    """Generate one call for each C++ kernel, as Inductor does on a GPU.

    On the CPU, Inductor merges all kernels between two extern kernels into one call. Then what the
    first kernel reads is freed only after the last one, and what the last one writes is allocated
    before the first one.
    """
    from torch._inductor.codegen import cpp

    scheduling: Any = cpp.CppScheduling
    max_arguments = scheduling.MAX_FUSED_KERNEL_ARGS_NUM
    scheduling.MAX_FUSED_KERNEL_ARGS_NUM = -1
    try:
        yield
    finally:
        scheduling.MAX_FUSED_KERNEL_ARGS_NUM = max_arguments


@contextmanager
def immediate_buffer_reuse() -> Iterator[None]:
    """Let only the next kernel reuse a dead buffer; free the buffer otherwise, as planned.

    Inductor keeps a dead buffer for a later one of the same size, as long as its own estimate of
    the peak allows.
    """
    from torch._inductor.codegen.wrapper import AllocateLine

    def is_next_kernel(line: Any, free_line: Any, size: int) -> bool:
        return free_line.scheduler_node_index + 1 == line.scheduler_node_index

    allocate_line: Any = AllocateLine
    original = allocate_line.should_reuse_buffer
    allocate_line.should_reuse_buffer = is_next_kernel
    try:
        yield
    finally:
        allocate_line.should_reuse_buffer = original
