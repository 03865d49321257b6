"""Traces for a GPU that are estimated by a roofline have the workspaces of its kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.documents.trace import Trace


class Attention(WithParts, qkv=(64, 192), out=(64, 64)):
    """Attention between two linear layers, with a loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv)
        return F.smooth_l1_loss(self.out(attended.transpose(1, 2).flatten(2)), y)


def estimated(trace: Trace, roofline: remat.Roofline) -> Trace:
    return remat.measure(trace, roofline)


def attention_trace(device: str | None) -> Trace:
    x = torch.randn(4, 1024, 64)
    return remat.trace(Attention(), (x, x), device=device)


def workspaces(trace: Trace) -> dict[str, int]:
    return {node.target: node.workspace_bytes or 0 for node in trace.nodes if not node.view}


def test_a_trace_for_a_gpu_has_the_workspaces_of_its_kernels() -> None:
    trace = estimated(attention_trace("h100"), remat.Roofline("h100"))
    by_target = workspaces(trace)
    # The bias's gradient is a sum over 4,096 rows, and attention's backward has float32 tiles.
    assert by_target["aten.sum.dim_IntList"] > 64 << 10
    tiles = 4 * 4 * 16 * (64 * 64 + 4) * 4
    attention = by_target["aten._scaled_dot_product_efficient_attention_backward.default"]
    assert attention >= tiles
    graph = trace.graph()
    assert max(operation.workspace_bytes for operation in graph.operations) >= tiles


def test_the_number_of_multiprocessors_decides_how_reductions_are_split() -> None:
    x = torch.empty(1 << 17, 64, device="meta", requires_grad=True)
    trace = remat.trace(nn.Linear(64, 64, device="meta"), x, device="h100")
    sizes = [
        workspaces(estimated(trace, remat.Roofline(name)))["aten.sum.dim_IntList"]
        for name in ("h100", "h200", "l4")
    ]
    assert sizes[0] == sizes[1] > sizes[2] > 0


def test_a_loss_keeps_the_storage_of_its_elements() -> None:
    captured = attention_trace("h100")
    trace = estimated(captured, remat.Roofline("h100"))
    (node,) = (n for n in trace.nodes if n.target == "aten.smooth_l1_loss.default")
    assert trace.storage_bytes[node.results[0].storage] == 4 * 4 * 1024 * 64
    assert captured.storage_bytes[node.results[0].storage] == 4


def test_a_trace_for_the_cpu_has_no_workspaces() -> None:
    assert not any(workspaces(estimated(attention_trace("cpu"), remat.Roofline("cpu"))).values())
    assert not any(workspaces(estimated(attention_trace("cpu"), remat.Roofline("h100"))).values())


def test_custom_rates_take_the_workspaces_of_the_device_of_the_trace() -> None:
    trace = attention_trace("h100")
    custom = remat.Roofline.custom("fast", fp32_flops_per_s=1e14, bytes_per_s=1e13)
    assert workspaces(estimated(trace, custom)) == workspaces(
        estimated(trace, remat.Roofline("h100"))
    )
    assert not any(workspaces(estimated(trace.replace(gpu=""), custom)).values())
