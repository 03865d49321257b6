"""Run code on the thread that autograd uses for the backward of a device.

Some state of CUDA libraries belongs to a thread: cuBLAS's handle with its workspace, and the
algorithms that cuDNN chose with `torch.backends.cudnn.benchmark` (`thread_local` in
`aten/src/ATen/native/cudnn/Conv_v8.cpp`). A step that must allocate nothing unplanned needs both on
both threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_in_backward(call: Callable[[], object], device: torch.device) -> None:
    """Run `call` on the backward's thread of a CUDA device; on the current thread of a CPU.

    Waits for its end, and raises what it raises.
    """
    with torch.enable_grad():
        leaf = torch.zeros((), device=device, requires_grad=True)
        result: torch.Tensor = _CallInBackward.apply(leaf, call)  # type: ignore[assignment]
    result.backward()


class _CallInBackward(torch.autograd.Function):
    """The identity, whose backward makes a call."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None
