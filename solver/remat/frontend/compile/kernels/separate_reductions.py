"""Separate reductions: sums that Inductor computes in one kernel, planned as kernels of their own.

The gradient of a bias that is used at every step of a loop is a sum of sums: Inductor computes all
of them in one kernel at the end of the loop, which keeps the large inputs of all of them in memory.
As kernels of their own they read the same bytes, and each input is freed once it is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from remat.frontend.common.aliases import producer, storage_base
from remat.frontend.compile.joint.fx_utils import is_reduction, node_bytes
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import (
    FusionGroup,
    producer_chain,
    sort_by_dependencies,
    tensors_read,
)

_MIN_REDUCTION_FACTOR = 8
"""The result of a separate reduction is written and read: it must be so much smaller than what the
reduction reads, and than what the rest of the kernel reads."""


def with_separate_reductions(
    joint: CompiledJointGraph, groups: Sequence[FusionGroup]
) -> list[FusionGroup]:
    """Return the groups, in execution order, with those reductions as groups of their own that
    read nothing which the rest of their kernel reads."""
    in_memory = {node for group in groups for node in group.written}
    divided = [part for group in groups for part in _divide(joint, group, in_memory)]
    return list(groups) if len(divided) == len(groups) else sort_by_dependencies(joint, divided)


def _divide(
    joint: CompiledJointGraph, group: FusionGroup, in_memory: set[fx.Node]
) -> list[FusionGroup]:
    """Return a group's separate reductions, and the rest of it. Adds what they write to
    `in_memory`."""
    reductions = [n for n in group.nodes if n not in group.written and _is_single_reduction(n)]
    if not group.is_generated or group.effects or not reductions:
        return [group]
    primals = set(joint.primals)
    parts: list[FusionGroup] = []
    for reduction in reductions:
        if reduction in in_memory:
            continue  # another group writes it
        chain = producer_chain([reduction], in_memory, joint)
        separate = replace(group, nodes=chain, written=[reduction])
        rest_nodes = producer_chain(map(producer, group.written), in_memory | {reduction}, joint)
        rest = replace(group, nodes=rest_nodes)
        # The rest reads the reduction, so the reduction must not read what the rest writes.
        is_before = tensors_read(separate).isdisjoint(map(storage_base, group.written))
        if is_before and _are_independent(separate, rest, reduction, primals):
            parts.append(separate)
            in_memory.add(reduction)
            group = rest
    return [*parts, group]


def _is_single_reduction(node: fx.Node) -> bool:
    return is_reduction(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _are_independent(
    separate: FusionGroup, rest: FusionGroup, reduction: fx.Node, primals: set[fx.Node]
) -> bool:
    """True if a reduction and the rest of its kernel have no operation in common and read no tensor
    in common, and both read much more than the reduction writes."""
    reads = tensors_read(separate) - primals
    other_reads = tensors_read(rest) - primals - {reduction}
    smallest_bytes = min(sum(map(node_bytes, nodes)) for nodes in (reads, other_reads))
    is_small = _MIN_REDUCTION_FACTOR * node_bytes(reduction) <= smallest_bytes
    has_common = not set(separate.nodes).isdisjoint(rest.nodes) or not reads.isdisjoint(other_reads)
    return is_small and not has_common
