"""Inductor's fusion of matrix products and additions, applied before the step is planned.

After the partition, Inductor rewrites `add(mm(a, b), c)` to `addmm(c, a, b)`, an extern kernel. The
gradient of a weight that every step of a loop uses is a sum of products. With `addmm`, each product
is added to the sum as soon as it is computed. A plan on the graph before that rewrite would add all
products in one kernel, with all of them in memory.

Where the other addend is computed after the product, the plan keeps two kernels. Inductor's rewrite
would delay the product, whose inputs then stay live.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.pattern_matcher import is_match

from remat.frontend.common.aliases import storage_base

_ADD = torch.ops.aten.add.Tensor
_ADDMM = torch.ops.aten.addmm.default


def fuse_matmul_additions(half: fx.GraphModule) -> None:
    """Rewrite a forward or backward graph as Inductor will, where that does not delay a product.

    The new node has the name of the addition: the halves of a step share their names.
    """
    if not config.pattern_matcher:
        return
    graph = half.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    for addition in reversed(graph.find_nodes(op="call_function", target=_ADD)):
        for product, addend in _products_in(addition):
            # An addition in another layout is not what `addmm` would write.
            if position[storage_base(addend)] < position[product] and _is_contiguous(addition):
                _replace_with_addmm(graph, addition, product, addend)
                break
    half.recompile()


def _products_in(addition: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the product and the other addend of an addition, as often as Inductor's patterns for
    `addmm` match it."""
    from torch._inductor.fx_passes import post_grad

    for pattern_pass in post_grad.pass_patterns:
        entries: list[Any] = pattern_pass.patterns.get(("call_function", _ADD), [])
        for entry in entries:
            if getattr(entry, "handler", None) is not post_grad.addmm:
                continue
            match = entry.pattern.match(addition)
            if is_match(match) and entry.extra_check(match):
                (product,) = (node for node in match.nodes if node is not addition)
                yield product, match.kwargs["inp"]


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.is_contiguous())


def _replace_with_addmm(
    graph: fx.Graph, addition: fx.Node, product: fx.Node, addend: fx.Node
) -> None:
    name = addition.name
    with graph.inserting_before(addition):
        fused = graph.call_function(_ADDMM, (addend, *product.args))
    fused.meta = dict(addition.meta)
    addition.replace_all_uses_with(fused)
    graph.erase_node(addition)
    graph.erase_node(product)
    fused.name = name
