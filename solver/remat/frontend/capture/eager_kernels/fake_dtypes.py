"""Results of kernels whose dtype a fake tensor gets wrong.

Normalisations of bfloat16 and float16 with weights in float32, as under autocast: on the CPU their
statistics are in the type of the weights, their fakes in that of the input. (Seen in torch 2.13.)
On CUDA they are in float32, whatever the weights are in. A fake tensor on CUDA says so; in a
capture for a GPU that is not here the fakes are on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from remat.frontend.common.target import Target

_LIKE: Mapping[str, Mapping[int, int]] = {
    "aten.native_layer_norm.default": {1: 2, 2: 2},
    "aten.native_group_norm.default": {1: 1, 2: 1},
    "aten.native_group_norm_backward.default": {0: 1},
    "aten._native_batch_norm_legit_functional.default": {1: 1, 2: 1, 3: 3, 4: 4},
}
"""By operation: on the CPU, which results have the dtype of which argument."""

_FLOAT32: Mapping[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (1, 2),
    "aten._batch_norm_with_update_functional.default": (1, 2),
    "aten._native_batch_norm_legit_functional.default": (1, 2),
    "aten._native_batch_norm_legit.no_stats": (1, 2),
}
"""By operation: on CUDA, which results are in float32 where the input is narrower."""


def correct_fakes(graph: fx.Graph, target: Target | None = None) -> None:
    """Give fake results the dtypes that the kernels return, on the device where they are or on
    `target`, and what autograd keeps of them too."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if source in corrected and node.target is operator.getitem:
            node.meta["val"] = source.meta["val"][node.args[1]]
        elif source in corrected and str(node.target) == "aten.detach.default":
            node.meta["val"] = source.meta["val"].detach()
        elif target is not None and (wide := _FLOAT32.get(str(node.target))) is not None:
            node.meta["val"] = _widened(node, wide)
        elif target is None and (like := _LIKE.get(str(node.target))) is not None:
            node.meta["val"] = _corrected(node, like)
        else:
            continue
        corrected.add(node)


def _corrected(node: fx.Node, like: Mapping[int, int]) -> tuple[object, ...]:
    fakes = list(node.meta["val"])
    for position, argument in like.items():
        fake, other = fakes[position], node.args[argument]
        if fake is not None and fake.device.type == "cpu" and isinstance(other, fx.Node):
            fakes[position] = fake.to(other.meta["val"].dtype)
    return tuple(fakes)


def _widened(node: fx.Node, positions: tuple[int, ...]) -> tuple[object, ...]:
    fakes = list(node.meta["val"])
    for position in positions:
        if fakes[position].dtype in (torch.bfloat16, torch.float16):
            fakes[position] = fakes[position].to(torch.float32)
    return tuple(fakes)
