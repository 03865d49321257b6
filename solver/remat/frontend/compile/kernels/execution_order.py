"""The execution order of fusion groups that are not Inductor's kernels.

Inductor orders its kernels for a small peak. Where some of them are divided, other tensors are live
between them, and that order need not be a good one: it may accumulate all gradients at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from remat.frontend.common.aliases import storage_base
from remat.frontend.compile.joint.fx_utils import node_bytes
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import (
    FusionGroup,
    sort_by_dependencies,
    tensors_read,
)


def reorder_for_peak(joint: CompiledJointGraph, groups: Sequence[FusionGroup]) -> list[FusionGroup]:
    """Return the groups in their order or in that of the joint graph, whichever has the smaller
    peak without recomputation."""
    in_graph_order = sort_by_dependencies(joint, groups, in_graph_order=True)
    return min((list(groups), in_graph_order), key=lambda order: _peak_bytes(joint, order))


def _peak_bytes(joint: CompiledJointGraph, groups: Sequence[FusionGroup]) -> int:
    """Return the peak of the tensors that groups write, each live from its group to its last
    reader, or to the end if the step returns it."""
    reads = [tensors_read(group) for group in groups]
    last_reader = {node: index for index, nodes in enumerate(reads) for node in nodes}
    last_reader.update(dict.fromkeys(map(storage_base, joint.returned_nodes), len(groups)))
    live: dict[fx.Node, int] = {}
    peak_bytes = 0
    for index, group in enumerate(groups):
        live.update({node: node_bytes(node) for node in group.written})
        peak_bytes = max(peak_bytes, sum(live.values()))
        for node in (*group.written, *reads[index]):
            if last_reader.get(node, index) <= index:
                live.pop(node, None)
    return peak_bytes
