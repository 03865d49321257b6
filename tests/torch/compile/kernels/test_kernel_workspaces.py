"""Workspaces of Inductor's kernels, by operation of the joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers.cpp_compiler import needs_compiler
from torch import fx, nn

from remat.frontend.compile.inductor import probe
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.cost_model import kernel_workspaces

ATEN = torch.ops.aten


def joint_graph(
    operations: Sequence[fx.Node], *kernels: probe.Kernel[fx.Node]
) -> CompiledJointGraph:
    graph = operations[0].graph
    return CompiledJointGraph(
        module=fx.GraphModule({}, graph),
        placeholders=tuple(graph.find_nodes(op="placeholder")),
        operations=tuple(operations),
        num_forward=len(operations),
        forward_outputs=(operations[-1],),
        gradients=(),
        saved_tensors=(),
        kernels=kernels,
        probe_results=(),
        mutated=frozenset(),
        output_meta={},
    )


def convolution_and_sum() -> tuple[fx.Node, fx.Node]:
    graph = fx.Graph()
    x, weight, bias = map(graph.placeholder, ("x", "weight", "bias"))
    args = (x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolution = graph.call_function(ATEN.convolution.default, args)
    total = graph.call_function(ATEN.sum.dim_IntList, (convolution, [0]))
    convolution.meta["val"] = torch.empty(2, 3, 4, 4, device="meta")
    total.meta["val"] = torch.empty(3, 4, 4, device="meta")
    return convolution, total


def test_a_kernel_that_adds_the_bias_does_not_set_a_convolutions_workspace() -> None:
    """On CUDA, Inductor adds the bias of a convolution in a generated kernel, whose tensor and
    origin are the convolution; the workspace of the convolution itself is unknown."""
    convolution, total = convolution_and_sum()
    joint = joint_graph(
        (convolution, total),
        probe.Kernel((), (convolution,), is_extern=True, workspace_bytes=None),
        probe.Kernel((convolution,), (convolution,), workspace_bytes=0),
        probe.Kernel((total,), (convolution, total), workspace_bytes=96),
    )
    assert kernel_workspaces(joint) == {total: 96}


def test_an_extern_kernels_measured_workspace_counts() -> None:
    convolution, total = convolution_and_sum()
    measured = probe.Kernel((), (convolution,), is_extern=True, workspace_bytes=640)
    assert kernel_workspaces(joint_graph((convolution, total), measured)) == {convolution: 640}


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("empty_compile_caches")
def test_convolutions_that_inductor_calls_in_aten_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA; on CPUs that is so without oneDNN. Such a convolution copies its input, nine
    times for a kernel of 3 x 3."""
    measured: list[int | None] = []

    def recorded(kernel: Any) -> int | None:
        workspace_bytes = original(kernel)
        if getattr(kernel, "op_overload", None) is ATEN.convolution.default:
            measured.append(workspace_bytes)
        return workspace_bytes

    original = probe.extern_workspace_bytes
    monkeypatch.setattr(probe, "extern_workspace_bytes", recorded)
    x = torch.randn(2, 8, 16, 16)
    is_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        model = nn.Conv2d(8, 8, 3, padding=1)
        run = torch.compile(model, backend="remat", options={"budget": "min"})
        run(x).square().mean().backward()
    finally:
        torch._C._set_mkldnn_enabled(is_enabled)
    assert measured
    assert all(workspace_bytes == 9 * x.nbytes for workspace_bytes in measured)
