"""Fused recomputation: saved tensors that a backward kernel recomputes next to its own outputs.

The weight gradient of a matmul reads the matmul's input, for example a softmax after dropout or an
activation. The kernel that computes the gradient of this input reads the tensors from which it was
computed. So this kernel can also write the input itself, in the same loop, and the input need not
be saved. That costs one more tensor written; it reads nothing more, and generates no random number
twice. A separate recomputation would read all of it once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import replace

from torch import fx

from remat.frontend.common.aliases import producer, storage_base
from remat.frontend.compile.joint.fx_utils import (
    is_cpu_transcendental,
    is_elementwise,
    node_bytes,
    storages_read_by,
)
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import (
    FusionGroup,
    producer_chain,
    set_dependencies,
    sort_by_dependencies,
    tensors_read,
)

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
        """Add the recomputation of a saved tensor to the first backward kernel that can do it for
        all backward readers. True if there is one."""
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
        """True if a kernel reads the inputs of the recomputation already, or can read them instead
        of tensors that take more bytes, and computes its expensive functions already."""
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
        """True if a tensor that only this group reads in the backward can be computed from `reads`
        by cheap elementwise operations."""
        is_written = node in self.forward_writer and node not in self.returned
        if not is_written or self._backward_readers(node) != [index]:
            return False
        chain = producer_chain([producer(node)], self.in_memory - {node}, self.joint)
        is_cheap = all(is_elementwise(n) and not is_cpu_transcendental(n) for n in chain)
        return is_cheap and storages_read_by(chain).difference(chain) <= reads | self.primals

    def _may_run_before(self, index: int, others: Iterable[int]) -> bool:
        """True if a group does not depend on the others, directly or indirectly."""
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
        """Have a group write a copy of a tensor, computed by `chain`, which all `readers` read."""
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
        """Return the number of a node's expression. A tensor that is read from memory equals only
        itself."""
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
