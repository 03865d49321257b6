"""Variants of a step: alternative divisions of its joint graph into fusion groups.

The first variant has Inductor's own kernels. The second one differs from it in three ways:

- Separate reductions. The gradient of a bias that is used at every step of a loop is a sum of sums:
  Inductor computes all of them in one kernel at the end of the loop, which keeps the large inputs
  of all of them in memory. As kernels of their own they read the same bytes, and each input is
  freed once it is summed. Inductor's order of kernels need not be good for them: it may accumulate
  all gradients at the end. So the order of the joint graph is tried, too.
- Fused recomputation. The weight gradient of a matmul reads the matmul's input, for example a
  softmax after dropout or an activation. The kernel that computes the gradient of this input reads
  the tensors from which it was computed. So this kernel can also write the input, in the same loop,
  and the input need not be saved. That costs one more tensor written; it reads nothing more, and
  generates no random number twice. A separate recomputation would read all of it once more.
- Inlined random masks (`inline_producers.py`).

All variants are planned, because it is not known in advance which is better: saving less for the
backward leaves more memory at its start, and takes more memory while its kernels run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import replace

import torch
from torch import fx

from remat.frontend.common.aliases import producer, storage_base
from remat.frontend.compile.fx_utils import (
    is_collective,
    is_cpu_transcendental,
    is_elementwise,
    is_reduction,
    node_bytes,
    storages_read_by,
)
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import (
    FusionGroup,
    find_fusion_groups,
    producer_chain,
    set_dependencies,
    sort_by_dependencies,
    tensors_read,
)
from remat.frontend.compile.kernels.inline_producers import inline_producers


def reorder_for_peak(joint: CompiledJointGraph, groups: Sequence[FusionGroup]) -> list[FusionGroup]:
    """Return the groups in their order or in the order of the joint graph, whichever has the
    smaller peak without recomputation."""
    in_graph_order = sort_by_dependencies(joint, groups, in_graph_order=True)
    return min(
        (list(groups), in_graph_order), key=lambda order: _group_order_peak_bytes(joint, order)
    )


def _group_order_peak_bytes(joint: CompiledJointGraph, groups: Sequence[FusionGroup]) -> int:
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


_MIN_REDUCTION_FACTOR = 8
"""The result of a separate reduction is written and read: it must be so much smaller than what the
reduction reads, and than what the rest of the kernel reads."""


def with_separate_reductions(
    joint: CompiledJointGraph, groups: Sequence[FusionGroup]
) -> list[FusionGroup]:
    """Return the groups, in execution order, with those reductions as groups of their own that
    read nothing which the rest of their kernel reads."""
    in_memory = {node for group in groups for node in group.written}
    divided = [part for group in groups for part in _divide_reductions(joint, group, in_memory)]
    return list(groups) if len(divided) == len(groups) else sort_by_dependencies(joint, divided)


def _divide_reductions(
    joint: CompiledJointGraph, group: FusionGroup, in_memory: set[fx.Node]
) -> list[FusionGroup]:
    """Return the reductions of a group that can be kernels of their own, and the rest of the group;
    the group alone if there are none. Adds the reductions' results to `in_memory`, the tensors that
    some kernel writes."""
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
        if is_before and _is_independent_reduction(separate, rest, reduction, primals):
            parts.append(separate)
            in_memory.add(reduction)
            group = rest
    return [*parts, group]


def _is_single_reduction(node: fx.Node) -> bool:
    """True if the node is a reduction with one output."""
    return is_reduction(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _is_independent_reduction(
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


_MIN_SIZE_DIVISOR = 256
"""Tensors below this fraction of all saved bytes are left as they are."""

_MAX_OPERATIONS = 200
"""Kernels with more operations are not searched for equal transcendental functions."""


def with_fused_recomputation(
    joint: CompiledJointGraph, groups: Sequence[FusionGroup]
) -> tuple[CompiledJointGraph, list[FusionGroup]] | None:
    """Return the joint graph and groups with saved tensors recomputed inside of backward kernels;
    None if no kernel can. The arguments stay unchanged."""
    fuser = _RecomputationFuser(joint, groups)
    by_size = sorted(fuser.forward_writer, key=node_bytes, reverse=True)  # stable for equal sizes
    min_bytes = sum(map(node_bytes, joint.saved_tensors)) / _MIN_SIZE_DIVISOR
    fused = [fuser.fuse(node) for node in by_size if node_bytes(node) >= min_bytes]
    if not any(fused):
        return None
    forward = joint.operations[: joint.num_forward]
    backward = joint.operations[joint.num_forward :]
    joint = replace(joint, operations=(*forward, *fuser.copies, *backward))
    return joint, sort_by_dependencies(joint, fuser.groups)


class _RecomputationFuser:
    """Fusion groups while recomputations are added to those of the backward, one tensor at a
    time."""

    def __init__(self, joint: CompiledJointGraph, groups: Sequence[FusionGroup]) -> None:
        self.joint = joint
        self.groups = [replace(group) for group in groups]
        set_dependencies(joint, self.groups)
        self.reads = [tensors_read(group) for group in self.groups]
        self.copies: list[fx.Node] = []
        """The recomputed copies, as nodes of the joint graph."""
        self.recomputation_reads: list[set[fx.Node]] = [set() for _ in groups]
        """For each group, the tensors that its recomputations read. It cannot recompute these, too:
        they would have to be there first."""
        self.returned = {storage_base(n) for n in joint.returned_nodes}
        self.primals = set(joint.primals)
        self.in_memory = {n for group in groups for n in group.written}
        self.forward_writer = {
            n: i
            for i, group in enumerate(groups)
            if group.is_generated and not group.is_backward
            for n in group.written
        }

    def fuse(self, node: fx.Node) -> bool:
        """Add the recomputation of a saved tensor to the first backward group that can do it for
        all backward readers, and return True; False if there is none."""
        readers = self._backward_readers(node)
        chain = producer_chain([producer(node)], self.in_memory - {node}, self.joint)
        if node in self.returned or not readers or not all(map(is_elementwise, chain)):
            return False
        chain_reads = storages_read_by(chain).difference(chain)
        if not self.joint.mutated.isdisjoint(chain_reads):
            return False
        for index, group in enumerate(self.groups):
            other_readers = [i for i in readers if i != index]
            if (
                group.is_backward
                and group.is_generated
                and other_readers
                and node not in self.recomputation_reads[index]
                and self._is_cheap_in(index, node, chain, chain_reads)
                and self._may_run_before(index, other_readers)
            ):
                self._add_recomputation(node, chain, index, readers)
                return True
        return False

    def _backward_readers(self, node: fx.Node) -> list[int]:
        """Return the indices of the backward groups that read a tensor."""
        reads = enumerate(self.reads)
        return [i for i, tensors in reads if self.groups[i].is_backward and node in tensors]

    def _is_cheap_in(
        self, index: int, node: fx.Node, chain: list[fx.Node], chain_reads: Set[fx.Node]
    ) -> bool:
        """True if the kernel of group `index` reads the inputs (`chain_reads`) of a tensor's
        recomputation `chain` already, or can read them instead of tensors that take more bytes, and
        computes its expensive functions already."""
        kernel_reads = self.reads[index]
        if not (chain_reads - self.primals) & kernel_reads:
            return False
        missing = chain_reads - kernel_reads - self.primals
        extra = {n for n in missing if not self._backward_readers(n)}
        saved = {node}
        if extra:
            reads = chain_reads | kernel_reads
            saved |= {n for n in kernel_reads if self._is_replaceable(n, reads, index)}
        if sum(map(node_bytes, extra)) >= sum(map(node_bytes, saved)):
            return False
        expensive = list(filter(is_cpu_transcendental, chain))
        if not expensive:
            return True
        group = self.groups[index]
        inside = {*group.all_nodes, *chain}
        if len(inside) > _MAX_OPERATIONS:
            return False
        numbering = _ValueNumbering(inside)
        computed = {numbering.number(n) for n in group.all_nodes if is_cpu_transcendental(n)}
        return all(numbering.number(n) in computed for n in expensive)

    def _is_replaceable(self, node: fx.Node, reads: Set[fx.Node], index: int) -> bool:
        """True if only group `index` reads a tensor of the forward in the backward, and the tensor
        can be computed from `reads` by cheap elementwise operations."""
        is_written = node in self.forward_writer and node not in self.returned
        if not is_written or self._backward_readers(node) != [index]:
            return False
        chain = producer_chain([producer(node)], self.in_memory - {node}, self.joint)
        is_cheap = all(is_elementwise(n) and not is_cpu_transcendental(n) for n in chain)
        return is_cheap and storages_read_by(chain).difference(chain) <= reads | self.primals

    def _may_run_before(self, index: int, others: Iterable[int]) -> bool:
        """True if group `index` does not depend on the groups `others`, directly or indirectly."""
        dependencies: set[int] = set()
        pending = [index]
        while pending:
            for dependency in self.groups[pending.pop()].dependencies - dependencies:
                dependencies.add(dependency)
                pending.append(dependency)
        return dependencies.isdisjoint(others)

    def _add_recomputation(
        self, node: fx.Node, chain: list[fx.Node], index: int, readers: list[int]
    ) -> None:
        """Make group `index` write a recomputed copy of a tensor, computed by `chain`, and the
        groups `readers` read this copy instead."""
        copy = node.graph.node_copy(node, lambda n: n)
        copy.meta = dict(node.meta)
        self.copies.append(copy)
        self.recomputation_reads[index] |= storages_read_by(chain)
        before = self.groups[index]
        nodes = dict.fromkeys((*chain, *before.nodes))
        if node not in before.nodes:
            nodes.pop(node, None)
        self.groups[index] = replace(before, nodes=[*nodes, copy], written=[*before.written, copy])
        for i in readers:
            group = self.groups[i]
            self.groups[i] = replace(
                group,
                dependencies=group.dependencies | ({index} if i != index else set()),
                recomputed_copies={**group.recomputed_copies, node: copy},
            )
        for i in {index, *readers}:
            self.reads[i] = tensors_read(self.groups[i])


class _ValueNumbering:
    """Value numbering of a kernel's operations: equal numbers for equal expressions."""

    def __init__(self, inside: Set[fx.Node]) -> None:
        self.inside = inside
        self.number_of: dict[fx.Node, int] = {}
        self.numbers: dict[Hashable, int] = {}

    def number(self, node: fx.Node) -> int:
        """Return the number of a node's expression, which equal expressions share. A tensor that is
        read from memory equals only itself."""
        if node not in self.number_of:
            key: Hashable = node.name
            if producer(node) in self.inside or storage_base(node) is not node:
                arguments = (*node.args, *sorted(node.kwargs.items()))
                key = (str(node.target), self._argument_key(arguments))
            self.number_of[node] = self.numbers.setdefault(key, len(self.numbers))
        return self.number_of[node]

    def _argument_key(self, argument: object) -> Hashable:
        """Return a hashable form of an argument, with nodes replaced by their numbers."""
        if isinstance(argument, fx.Node):
            return self.number(argument)
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._argument_key, argument))
        return repr(argument)


Variant = tuple[CompiledJointGraph, list[FusionGroup]]
"""A joint graph and its fusion groups in execution order."""


def find_variants(joint: CompiledJointGraph, *, baseline_only: bool) -> list[Variant]:
    """Return the variants to plan: the step as torch.compile runs it and, unless `baseline_only`,
    one with separate reductions, fused recomputation and inlined random masks. The second one is
    left out without Inductor, if it is the same, or if its order of collectives differs."""
    groups = find_fusion_groups(joint)
    variants = [(joint, inline_producers(joint, groups))]
    if joint.kernels is not None and not baseline_only:
        num_kernels = len(groups)
        groups = with_separate_reductions(joint, groups)
        has_separate_reductions = len(groups) > num_kernels
        joint, groups = with_fused_recomputation(joint, groups) or (joint, groups)
        fused = inline_producers(joint, groups, inline_random=True)
        if has_separate_reductions:
            fused = reorder_for_peak(joint, fused)
        baseline = variants[0][1]
        is_different = [g.written for g in fused] != [g.written for g in baseline]
        # Each process selects a variant by its own timings: all need the same order of collectives.
        if is_different and _collective_operations(fused) == _collective_operations(baseline):
            variants.append((joint, fused))
    return variants


def _collective_operations(groups: Sequence[FusionGroup]) -> list[fx.Node]:
    """Return the collective operations of groups in execution order."""
    return [node for group in groups for node in group.all_nodes if is_collective(node)]
