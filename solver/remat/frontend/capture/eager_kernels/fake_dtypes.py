"""Corrections of fake tensors whose dtype differs from the kernel's result.

Affected are normalizations of bfloat16 and float16 inputs with float32 weights, as under autocast.
On the CPU their statistics have the dtype of the weights; their fake tensors have that of the
input. (Seen in torch 2.13.) On CUDA the statistics are float32, whatever the dtype of the weights.
A fake tensor on CUDA says so; but in a capture for an absent GPU the fake tensors are on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from remat.frontend.common.target_gpu import TargetGpu

_CPU_DTYPE_ARGUMENTS: Mapping[str, Mapping[int, int]] = {
    "aten.native_layer_norm.default": {1: 2, 2: 2},
    "aten.native_group_norm.default": {1: 1, 2: 1},
    "aten.native_group_norm_backward.default": {0: 1},
    "aten._native_batch_norm_legit_functional.default": {1: 1, 2: 1, 3: 3, 4: 4},
}
"""By operator: on the CPU, the index of the argument whose dtype a result has, by the result's
index."""

_CUDA_FLOAT32_RESULTS: Mapping[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (1, 2),
    "aten._batch_norm_with_update_functional.default": (1, 2),
    "aten._native_batch_norm_legit_functional.default": (1, 2),
    "aten._native_batch_norm_legit.no_stats": (1, 2),
}
"""By operator: on CUDA, the indices of the results that are float32 where the input is narrower."""


def correct_fake_dtypes(graph: fx.Graph, target: TargetGpu | None = None) -> None:
    """Give the fake tensors of a graph the dtypes that the kernels return, on their own device or
    on the absent GPU `target`. That includes the copies that autograd saves."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        producer = node.args[0] if node.args else None
        if producer in corrected and node.target is operator.getitem:
            node.meta["val"] = producer.meta["val"][node.args[1]]
        elif producer in corrected and str(node.target) == "aten.detach.default":
            node.meta["val"] = producer.meta["val"].detach()
        elif target is not None and (wide := _CUDA_FLOAT32_RESULTS.get(str(node.target))):
            node.meta["val"] = _with_float32_results(node, wide)
        elif target is None and (dtype_of := _CPU_DTYPE_ARGUMENTS.get(str(node.target))):
            node.meta["val"] = _with_argument_dtypes(node, dtype_of)
        else:
            continue
        corrected.add(node)


def _with_argument_dtypes(node: fx.Node, dtype_of: Mapping[int, int]) -> tuple[object, ...]:
    """Return the node's fake results; CPU results listed in `dtype_of` get an argument's dtype."""
    fakes = list(node.meta["val"])
    for position, argument_index in dtype_of.items():
        fake, argument = fakes[position], node.args[argument_index]
        if fake is not None and fake.device.type == "cpu" and isinstance(argument, fx.Node):
            fakes[position] = fake.to(argument.meta["val"].dtype)
    return tuple(fakes)


def _with_float32_results(node: fx.Node, positions: tuple[int, ...]) -> tuple[object, ...]:
    """Return the node's fake results; 16-bit ones at these positions become float32."""
    fakes = list(node.meta["val"])
    for position in positions:
        if fakes[position].dtype in (torch.bfloat16, torch.float16):
            fakes[position] = fakes[position].to(torch.float32)
    return tuple(fakes)
