"""Inlined producers: operations that a kernel recomputes instead of reading their output.

torch's partitioner selects the saved tensors, and with them what the kernels of forward and
backward write. Some of these tensors cost nothing to recompute in the kernels that read them: rows
gathered from a parameter (the experts of each token), or a normalization of a tensor that the
kernel reads anyway. If such a tensor were written, a plan could only retain it or write it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

import torch
from torch import fx

from remat.frontend.common.aliases import producer, storage_base
from remat.frontend.compile.fx_utils import (
    TRANSCENDENTAL,
    is_cpu_transcendental,
    is_elementwise,
    is_gather,
    is_matmul,
    is_reduction,
    is_seed_lookup,
    is_seeded_random,
    is_symbolic_scalar,
    node_bytes,
    num_elements,
    output_tensors,
    storages_read_by,
)
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import (
    FusionGroup,
    moved_bytes,
    producer_chain,
    scalar_work_s,
    tensors_read,
)

_EXTRA_READ_DIVISOR = 8
"""To inline a tensor that other groups still read, a group may read an eighth of the tensor's bytes
in addition: indices, means."""

_MAX_READS, _MAX_OPERATIONS = 8, 24
"""Inductor writes the input of a reduction to memory if computing it reads or does more than this
(its options `realize_acc_reads_threshold` and `realize_opcount_threshold`, which also count loads).
An elementwise consumer is in one loop with its producer in any case."""


def inline_producers(
    joint: CompiledJointGraph, groups: list[FusionGroup], *, inline_random: bool = False
) -> list[FusionGroup]:
    """Return the groups with producers inlined where that moves no more bytes than reading their
    output. A tensor that no group reads any more is not written. With `inline_random`, random
    operations on CPUs are inlined, too: there masks cost more to write and read."""
    return _ProducerInliner(joint, groups, inline_random).inlined_groups()


class _ProducerInliner:
    """Fusion groups while producers are inlined into them, one tensor at a time."""

    def __init__(
        self, joint: CompiledJointGraph, groups: list[FusionGroup], inline_random: bool
    ) -> None:
        self.joint = joint
        self.inline_random = inline_random
        self.groups = list(groups)
        self.primals = set(joint.primals)
        self.returned = {storage_base(n) for n in joint.returned_nodes}
        self.writer = {n: i for i, group in enumerate(groups) for n in group.written}
        self.readers: dict[fx.Node, set[int]] = {}
        for index, group in enumerate(groups):
            for node in tensors_read(group):
                self.readers.setdefault(node, set()).add(index)
        self.inlined: list[set[fx.Node]] = [set() for _ in groups]
        """For each group, the tensors that it recomputes."""

    def inlined_groups(self) -> list[FusionGroup]:
        """Try to inline each tensor, the largest first, and return the groups that are left."""
        copies = {n for group in self.groups for n in group.recomputed_copies.values()}
        candidates = [
            n for n, i in self.writer.items() if self.groups[i].is_generated and n not in copies
        ]
        for node in sorted(candidates, key=node_bytes, reverse=True):  # stable for equal sizes
            if not self._inline_in_all_readers(node):
                self._inline_where_few_bytes_are_added(node)
        return [group for group in self.groups if group.all_nodes]

    def _inline_in_all_readers(self, node: fx.Node) -> bool:
        """Inline a tensor into all groups that read it, so that it is not written at all, and
        return True. Return False and change nothing if the step returns it, a reader must not
        recompute it, or that moves more bytes or takes more time."""
        readers = sorted(self.readers.get(node, ()))
        if not readers or node in self.returned:
            return False
        extra_reads: set[fx.Node] = set()
        changed: dict[int, FusionGroup] = {}
        for index in readers:
            if (inlined := self._with_inlined(node, index)) is None:
                return False
            changed[index], reads = inlined
            extra_reads |= reads
        if sum(map(node_bytes, extra_reads)) > node_bytes(node):
            return False
        writer = self.writer[node]
        changed[writer] = self._without_output(node, changed.get(writer, self.groups[writer]))
        bytes_before = sum(moved_bytes(self.groups[index]) for index in changed)
        if sum(map(moved_bytes, changed.values())) > bytes_before:
            return False
        before_s = sum(scalar_work_s(self.groups[index]) for index in changed)
        if sum(map(scalar_work_s, changed.values())) > before_s:
            return False
        for index, group in changed.items():
            self._replace_group(index, group)
            if index != writer:
                self.inlined[index].add(node)
        del self.writer[node]
        return True

    def _inline_where_few_bytes_are_added(self, node: fx.Node) -> None:
        """Inline a tensor, which is still written to memory, into each group whose kernel then
        reads few bytes more, moves no more bytes and takes no more time."""
        for index in sorted(self.readers.get(node, ())):
            if (inlined := self._with_inlined(node, index)) is None:
                continue
            group, extra_reads = inlined
            extra_bytes = sum(map(node_bytes, extra_reads))
            before = self.groups[index]
            is_small = _EXTRA_READ_DIVISOR * extra_bytes <= node_bytes(node)
            is_cheap = scalar_work_s(group) <= scalar_work_s(before)
            if is_small and is_cheap and moved_bytes(group) <= moved_bytes(before):
                self._replace_group(index, group)
                self.inlined[index].add(node)

    def _with_inlined(self, node: fx.Node, index: int) -> tuple[FusionGroup, set[fx.Node]] | None:
        """Return the group `index` with a tensor's producers inlined, and the tensors that it reads
        for them in addition; None where the group must not recompute the tensor."""
        group = self.groups[index]
        if not group.is_generated:
            return None
        chain = producer_chain(
            [producer(node)], self.writer.keys() - self.inlined[index], self.joint
        )
        chain_reads = storages_read_by(chain)
        available = tensors_read(group) | self.primals
        if not self.joint.mutated.isdisjoint(chain_reads):
            return None
        if any(group.recomputed_copies.get(n) in group.written for n in chain_reads):
            return None  # the group would read its own output before it is written
        if not all(
            self._is_inlinable_random(n) or _is_cheap_elementwise(n, available) for n in chain
        ):
            return None
        consumers = non_elementwise_consumers_in_group(node, group)
        if consumers and not _is_inlinable_into(node, chain, group, consumers):
            return None
        extra_reads = chain_reads.difference(chain, available)
        same_position = [n for n in extra_reads if _is_read_at_same_positions(n, node, chain)]
        same_position.sort(key=lambda n: n.name)  # the same plan in every process
        larger = replace(
            group,
            nodes=sorted({*group.nodes, *chain}, key=self.joint.position.__getitem__),
            inlined={**group.inlined, node: same_position},
            unshared_consumers=group.unshared_consumers | consumers,
        )
        return larger, extra_reads

    def _is_inlinable_random(self, operation: fx.Node) -> bool:
        """True for a random operation on the CPU that may be recomputed, and for its seed."""
        on_cpu = all(tensor.device.type == "cpu" for tensor in output_tensors(operation))
        is_random_or_seed = is_seeded_random(operation) or is_seed_lookup(operation)
        return self.inline_random and on_cpu and is_random_or_seed

    def _without_output(self, node: fx.Node, group: FusionGroup) -> FusionGroup:
        """Return the group without the output `node`, and without the operations that only this
        output needs."""
        written = [n for n in group.written if n is not node]
        in_memory = self.writer.keys() - self.inlined[self.writer[node]] - {node}
        nodes = producer_chain(map(producer, written), in_memory, self.joint)
        effects = producer_chain(group.effects, in_memory, self.joint)
        effects = [n for n in effects if n not in set(nodes)]
        return replace(group, nodes=nodes, written=written, effects=effects)

    def _replace_group(self, index: int, group: FusionGroup) -> None:
        """Replace the group `index`, and update the readers of the tensors that it reads."""
        for node in tensors_read(self.groups[index]):
            self.readers[node].discard(index)
        for node in tensors_read(group):
            self.readers.setdefault(node, set()).add(index)
        self.groups[index] = group


def non_elementwise_consumers_in_group(node: fx.Node, group: FusionGroup) -> set[fx.Node]:
    """Return the operations of a group that are not elementwise (reductions, matmuls, scatters) and
    consume a tensor, directly or through elementwise operations of the group."""
    inside = set(group.nodes)
    consumers: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in seen or (user not in inside and storage_base(user) is user):
                continue
            seen.add(user)
            if user in inside and not is_elementwise(user):
                consumers.add(user)
            else:
                pending.append(user)
    return consumers


def _is_inlinable_into(
    node: fx.Node, chain: Iterable[fx.Node], group: FusionGroup, consumers: Iterable[fx.Node]
) -> bool:
    """True if a tensor may be inlined for these consumers in the group, which are not elementwise:
    if they are reductions and matmuls that compute each of its elements about once, with little
    work. `chain` are the operations that compute it. Scatters, sorts and concatenations read
    memory."""
    if not all(is_reduction(n) or is_matmul(n) for n in consumers):
        return False
    if any(str(operation.target) in TRANSCENDENTAL for operation in chain):
        return False
    inside = {*group.nodes, *chain}
    if not all(_input_stays_unwritten(n, inside) for n in consumers):
        return False
    elements = sum(map(num_elements, output_tensors(node)))
    readers = [n for n in group.nodes if any(storage_base(i) is node for i in n.all_input_nodes)]
    only_gathers = all(map(is_gather, chain))
    return only_gathers or all(_max_operand_elements(n) <= elements for n in readers)


def _input_stays_unwritten(consumer: fx.Node, inside: Set[fx.Node]) -> bool:
    """True if Inductor computes the input of `consumer`, a reduction or matmul, inside the
    consumer's kernel instead of writing it to memory: it does so for few operations and reads.
    `inside` are the operations of the kernel, of which each consumer must have its own copies."""
    num_operations = 0
    reads: set[fx.Node] = set()
    pending = list(consumer.all_input_nodes)
    while pending and num_operations <= _MAX_OPERATIONS:
        read = producer(pending.pop())
        if read in inside and is_elementwise(read):
            num_operations += 1
            pending += read.all_input_nodes
        elif not is_symbolic_scalar(read):
            reads.add(read)
    return num_operations <= _MAX_OPERATIONS and len(reads) <= _MAX_READS


def _max_operand_elements(operation: fx.Node) -> int:
    """Return the number of elements of the largest input or output of an operation."""
    nodes = (operation, *operation.all_input_nodes)
    return max(sum(map(num_elements, output_tensors(n))) for n in nodes)


def _is_cheap_elementwise(operation: fx.Node, available: Set[fx.Node]) -> bool:
    """True for an elementwise operation that is no transcendental function on the CPU, and whose
    inputs have no more elements than its output, except those that are `available`."""
    if not is_elementwise(operation):
        return False
    if is_cpu_transcendental(operation):
        return False
    elements = sum(map(num_elements, output_tensors(operation)))
    inputs = (n for n in operation.all_input_nodes if storage_base(n) not in available)
    return all(sum(map(num_elements, output_tensors(n))) <= elements for n in inputs)


def _is_read_at_same_positions(read: fx.Node, node: fx.Node, chain: Iterable[fx.Node]) -> bool:
    """True if the operations of `chain`, which compute `node`, read the tensor `read` in the same
    layout: each element for the element of `node` at the same position."""
    read_value, value = (n.meta["val"] for n in (read, node))
    if not isinstance(read_value, torch.Tensor) or read_value.shape != value.shape:
        return False
    readers = [n for n in chain if any(storage_base(i) is read for i in n.all_input_nodes)]
    is_direct = all(read in n.all_input_nodes and not is_gather(n) for n in readers)
    return is_direct and read_value.stride() == value.stride()
