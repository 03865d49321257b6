"""Faults under torch.compile: in what is verified of Inductor's kernels, and for which plan.

The session compiles a small model twice, within the smallest peak and without recomputation. The
bytes that it requests on CUDA must be at most the verified peak and at least 99% of it, and each
compiled step must have one. Kernels need not compute anything for that.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config

import remat
from benchmarks.software_gpu.planted_faults.fault import Plant, patched
from benchmarks.software_gpu.planted_faults.session import library_workspace_bytes
from remat.frontend.compile.inductor import peak_check
from remat.frontend.compile.registry import CompiledPlan, compiled_plans

MIN_SHARE = 0.99
ROWS, TOKENS, HEADS, WIDTH = 4, 128, 2, 64
BUDGETS = ("min", "100%")


class CompiledNet(nn.Module):
    """A model with pointwise operations, attention, and a large output that its backward does not
    read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a scalar loss and a large tensor."""
        hidden = self.first(x)
        heads = self.second(F.gelu(hidden).sin()).view(ROWS, TOKENS, 3, HEADS, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return attended.square().mean() + hidden.cos().mean(), hidden + 1


@dataclass(frozen=True)
class CompiledFault:
    """A fault that a compiled step must notice, on CUDA. See `Fault`."""

    name: str
    plant: Plant
    devices: tuple[str, ...] = ("cuda",)

    def noticed(self, device: str) -> list[str]:
        """Return what notices the fault."""
        # Kernels from Inductor's cache are not verified again.
        with (
            self.plant(),
            config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            return [f"{budget}: {text}" for budget in BUDGETS for text in _differences(budget)]


def faults() -> list[CompiledFault]:
    """Return the faults of this module, and the session without one."""
    return [
        CompiledFault("no fault, compiled", patched()),
        CompiledFault(
            "kernels not verified",
            patched((peak_check.PeakVerifier, "__call__", lambda self, nodes: nodes)),
        ),
        CompiledFault(
            "kernels verified for a stale plan",
            patched((peak_check, "_plan_of_kernels", _first_plan)),
        ),
        CompiledFault(
            "outputs that the caller retains not counted",
            patched((peak_check, "_plan_of_kernels", _plan_without_retained_bytes)),
        ),
        CompiledFault(
            "all kernels taken for in-place ones",
            patched((peak_check, "in_place_buffers", _always_in_place)),
        ),
        CompiledFault(
            "workspaces of extern kernels not counted",
            patched((peak_check, "_kernel_workspace_bytes", lambda kernel: 0)),
        ),
    ]


_plan_of = peak_check._plan_of_kernels


def _first_plan(kernels: Any) -> CompiledPlan | None:
    """Return the plan of the first budget, also while the second one is compiled."""
    plans = compiled_plans()
    return plans[0] if plans else _plan_of(kernels)


def _plan_without_retained_bytes(kernels: Any) -> CompiledPlan | None:
    compiled = _plan_of(kernels)
    if compiled is not None:
        compiled.retained_bytes, compiled.retained_names = 0, frozenset()
    return compiled


def _always_in_place(kernels: Any, overwritable: Any) -> Mapping[str, str]:
    """Return for each kernel's output the first buffer that the kernel reads."""
    return {
        buffer.get_name(): read.name
        for kernel in kernels
        for buffer, read in zip(kernel.get_outputs(), kernel.read_writes.reads, strict=False)
        if read.name.startswith("buf")
    }


def _differences(budget: str) -> list[str]:
    """Compile the model within a budget, and return where its steps differ from what is
    verified."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CompiledNet().cuda()
    x = torch.randn(ROWS, TOKENS, WIDTH, device="cuda")
    before = len(compiled_plans())
    compiled = remat.compile(model, budget, time_limit=5.0)
    _step_bytes(compiled, model, x)
    gc.collect()
    requested_bytes = _step_bytes(compiled, model, x) - library_workspace_bytes()
    (plan,) = compiled_plans()[before:]
    verified_bytes = plan.verified_bytes
    if verified_bytes is None:
        return ["the kernels are not verified"]
    if requested_bytes > verified_bytes:
        return [f"requested {requested_bytes - verified_bytes:,} bytes above the verified peak"]
    if requested_bytes < MIN_SHARE * verified_bytes:
        return [f"requested {requested_bytes / verified_bytes:.1%} of the verified peak"]
    return []


def _step_bytes(compiled: Any, model: nn.Module, x: torch.Tensor) -> int:
    """Run a step whose outputs live until its end, and return the peak of requested bytes."""
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    outputs = compiled(x)
    outputs[0].backward()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]
