"""Results of the CPU's kernels whose dtype a fake tensor gets wrong.

Normalisations of bfloat16 and float16 with weights in float32, as under autocast: their statistics
are in the type of the weights, their fakes in that of the input. (Seen in torch 2.13.)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

_LIKE: Mapping[str, Mapping[int, int]] = {
    "aten.native_layer_norm.default": {1: 2, 2: 2},
    "aten.native_group_norm.default": {1: 1, 2: 1},
    "aten.native_group_norm_backward.default": {0: 1},
    "aten._native_batch_norm_legit_functional.default": {1: 1, 2: 1, 3: 3, 4: 4},
}
"""By operation: which results have the dtype of which argument."""


def correct_fakes(graph: fx.Graph) -> None:
    """Give fake results the dtypes that the kernels return, and what autograd keeps of them too."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if source in corrected and node.target is operator.getitem:
            node.meta["val"] = source.meta["val"][node.args[1]]
        elif source in corrected and str(node.target) == "aten.detach.default":
            node.meta["val"] = source.meta["val"].detach()
        elif (like := _LIKE.get(str(node.target))) is not None:
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
