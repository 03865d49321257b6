"""Fusion groups: operations that Inductor compiles into one kernel.

The solver sees a group as one operation. A tensor that is written and read only inside of a group
takes no memory, and an operation that two groups need is computed in both. The groups of a step
without recomputation are read off Inductor's scheduler (`inductor/probe.py`). The plan schedules
these groups, and Inductor is made to keep them (`inductor/fusion_control.py`). Without Inductor,
each operation is a group of its own.

On CPUs, a group's time does not only depend on the bytes that it moves: Inductor generates random
numbers one at a time, and packs and unpacks boolean masks one element at a time. So a kernel that
reads a mask takes many times as long as one that reads floats, and to recompute a random mask costs
less than to write and read it (`scalar_work_s`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx
from torch._inductor import config

from remat.errors import TraceError
from remat.frontend.common.aliases import is_getitem, mutated_args, producer, storage_base
from remat.frontend.compile.fx_utils import (
    has_multiple_outputs,
    has_side_effect,
    is_operation,
    is_recomputable,
    is_seeded_random,
    node_bytes,
    num_elements,
    output_tensors,
    samples_generator,
    storages_read_by,
)
from remat.frontend.compile.joint_graph import CompiledJointGraph


class _KernelResults(NamedTuple):
    """The results of one kernel: the tensors that it writes, and its operations with side
    effects (they mutate a tensor that outlives the step, or assert)."""

    written: list[fx.Node]
    side_effects: list[fx.Node]


@dataclass
class FusionGroup:
    """Operations that become one kernel.

    `nodes` are the operations in execution order, `written` the tensors that they write to memory.
    `effects` are operations with side effects, and the producers that only these need: they belong
    to the first run of the group, and are not recomputed. `is_generated` is True where Inductor
    generates the kernel, False for an extern kernel. `dependencies` are the indices of the groups
    that must run before. `inlined` are producers that the group recomputes instead of reading them
    (`inline_producers.py`), each with the tensors that are read at the same positions instead.
    `unshared_consumers` are the reductions and matmuls of the group that read an inlined producer:
    each gets its own copy of the elementwise operations that lead to it. `recomputed_copies` maps a
    tensor to the fused recomputation (`variants.py`) that the group reads in its place.
    """

    nodes: list[fx.Node]
    written: list[fx.Node]
    effects: list[fx.Node]
    is_backward: bool
    is_generated: bool = False
    dependencies: set[int] = field(default_factory=set[int])
    inlined: dict[fx.Node, list[fx.Node]] = field(default_factory=dict[fx.Node, list[fx.Node]])
    unshared_consumers: frozenset[fx.Node] = frozenset()
    recomputed_copies: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    @property
    def all_nodes(self) -> list[fx.Node]:
        """The operations of the first run: `nodes` and `effects`."""
        return [*self.nodes, *self.effects]


def find_fusion_groups(joint: CompiledJointGraph) -> list[FusionGroup]:
    """Divide a joint graph into fusion groups, in the order in which Inductor runs the kernels,
    or in graph order without Inductor.

    Raises `TraceError` where operations depend on each other in a cycle, or where two kernels need
    an operation that must run once.
    """
    results = _kernel_results(joint)
    while True:
        groups = _groups_of_results(joint, results)
        ordered, cyclic = _sort_groups(joint, groups)
        if not cyclic:
            return ordered
        # Two kernels may need each other's outputs where Inductor did not list all that they
        # write: divide these into one group for each tensor.
        divided = [
            part
            for index, kernel in enumerate(results)
            for part in (_divide_kernel_by_tensor(kernel) if index in cyclic else [kernel])
        ]
        if len(divided) == len(results):
            raise TraceError("the operations of this step depend on each other in a cycle")
        results = divided


def sort_by_dependencies(
    joint: CompiledJointGraph, groups: Sequence[FusionGroup], *, in_graph_order: bool = False
) -> list[FusionGroup]:
    """Return the groups sorted so that each follows the groups that it depends on; among these
    orders, the one of Inductor's kernels or, with `in_graph_order`, of the joint graph. Sets
    `dependencies`, for groups whose operations or tensors have changed."""
    set_dependencies(joint, groups)
    ordered, cyclic = _sort_groups(joint, groups, in_graph_order=in_graph_order)
    assert not cyclic
    return ordered


def _sort_groups(
    joint: CompiledJointGraph, groups: Sequence[FusionGroup], *, in_graph_order: bool = False
) -> tuple[list[FusionGroup], set[int]]:
    """Return the groups in execution order, and the indices of the groups that a dependency cycle
    leaves out. With `in_graph_order`, Inductor's order of kernels does not count."""
    kernel_of = {} if in_graph_order else _kernel_indices(joint)
    kernel_indices = [_last_kernel_index(group, kernel_of) for group in groups]
    last_positions = [max(joint.position[node] for node in group.all_nodes) for group in groups]
    return _topological_order(groups, kernel_indices, last_positions)


def _divide_kernel_by_tensor(kernel: _KernelResults) -> list[_KernelResults]:
    """Divide the results of a kernel into one for each tensor that it writes; the last one has the
    side effects."""
    single = [_KernelResults([node], []) for node in kernel.written[:-1]]
    return [*single, _KernelResults(kernel.written[-1:], kernel.side_effects)]


def _kernel_indices(joint: CompiledJointGraph) -> dict[fx.Node, int]:
    """Map each tensor that Inductor writes, and each extern operation, to its kernel's index."""
    index_of: dict[fx.Node, int] = {}
    for index, kernel in enumerate(joint.kernels or ()):
        for node in kernel.written:
            index_of.setdefault(storage_base(node), index)
        for node in kernel.origins:
            if not joint.is_generated(node):
                index_of.setdefault(node, index)
    return index_of


def _last_kernel_index(group: FusionGroup, kernel_of: Mapping[fx.Node, int]) -> int:
    """Return the index of the last Inductor kernel that computes a part of the group; -1 if no
    kernel names one."""
    return max((kernel_of.get(n, -1) for n in (*group.written, *group.all_nodes)), default=-1)


def _groups_of_results(
    joint: CompiledJointGraph, results: list[_KernelResults]
) -> list[FusionGroup]:
    """Build the fusion group of each kernel from its results, with all dependencies."""
    in_memory = {node for kernel in results for node in kernel.written}
    groups: list[FusionGroup] = []
    for written, side_effects in results:
        nodes = producer_chain(map(producer, written), in_memory, joint)
        chain = producer_chain(side_effects, in_memory, joint)
        effects = [node for node in chain if node not in set(nodes)]
        first = producer(written[0]) if written else side_effects[0]
        is_generated = bool(written) and joint.is_generated(first)
        groups.append(FusionGroup(nodes, written, effects, joint.is_backward(first), is_generated))
    _check_run_once_operations(groups)
    set_dependencies(joint, groups)
    return groups


def _check_run_once_operations(groups: Iterable[FusionGroup]) -> None:
    """Raise `TraceError` where two groups contain an operation that must not be recomputed."""
    seen: set[fx.Node] = set()
    for group in groups:
        run_once = {node for node in group.all_nodes if not is_recomputable(node)}
        if duplicated := seen & run_once:
            names = ", ".join(sorted(str(node.target) for node in duplicated))
            raise TraceError(
                f"two kernels need the output of {names}, which must not be computed twice"
            )
        seen |= run_once


def _kernel_results(joint: CompiledJointGraph) -> list[_KernelResults]:
    """Return the results of each of Inductor's kernels, then of each operation that no kernel
    names: of all operations without Inductor."""
    in_memory = _tensors_in_memory(joint)
    seen: set[fx.Node] = set()
    results: list[_KernelResults] = []
    listed = {storage_base(n) for kernel in joint.kernels or () for n in kernel.written}
    for kernel in joint.kernels or ():
        # Inductor does not list all that a kernel writes: the rest belongs to its operation.
        origins = [*kernel.origins, *(u for n in kernel.origins for u in n.users if is_getitem(u))]
        nodes = [storage_base(n) for n in kernel.written]
        nodes += [n for n in origins if n not in listed]
        new = [n for n in dict.fromkeys(nodes) if n not in seen and n in joint.position]
        written = [n for n in new if n in in_memory and joint.is_generated(producer(n))]
        side_effects = [n for n in new if has_side_effect(n)]
        seen.update(written, side_effects)
        if written or side_effects:
            results.append(_KernelResults(written, side_effects))
    outputs_of: dict[fx.Node, list[fx.Node]] = {}
    for node in sorted(in_memory - seen, key=joint.position.__getitem__):
        outputs_of.setdefault(producer(node), []).append(node)
    results += [_KernelResults(outputs, []) for outputs in outputs_of.values()]
    effects = [n for n in joint.operations if has_side_effect(n) and n not in seen]
    return results + [_KernelResults([], [node]) for node in effects]


def _tensors_in_memory(joint: CompiledJointGraph) -> set[fx.Node]:
    """Return the tensors that some kernel writes to memory: outputs of kernels and of random
    operations, inputs and outputs of extern kernels, saved tensors, and results of the step.
    Without Inductor, all of them."""
    nodes = {storage_base(n) for n in joint.returned_nodes}
    nodes |= {n for n in joint.operations if samples_generator(n) and not has_multiple_outputs(n)}
    nodes |= {storage_base(n) for n in joint.saved_tensors}
    nodes |= {storage_base(n) for kernel in joint.kernels or () for n in kernel.written}
    for node in joint.operations:
        if is_operation(node) and not joint.is_generated(node):
            nodes |= {n for n in node.users if is_getitem(n)} or {node}
            if not mutated_args(node):
                nodes |= {storage_base(n) for n in node.all_input_nodes}
    return {
        n
        for n in nodes
        if n in joint.position and is_operation(producer(n)) and not mutated_args(producer(n))
    }


def producer_chain(
    operations: Iterable[fx.Node], in_memory: set[fx.Node], joint: CompiledJointGraph
) -> list[fx.Node]:
    """Return the operations and, transitively, the producers of their inputs, except inputs that
    are `in_memory`, in execution order."""
    chain: set[fx.Node] = set()
    pending = list(operations)
    while pending:
        node = pending.pop()
        if node in chain:
            continue
        chain.add(node)
        for read in map(storage_base, node.all_input_nodes):
            if read in joint.position and is_operation(producer(read)) and read not in in_memory:
                pending.append(producer(read))
    return sorted(chain, key=joint.position.__getitem__)


def tensors_read(group: FusionGroup) -> set[fx.Node]:
    """Return the storage bases that a group reads from memory."""
    inside = set(group.all_nodes)
    read = {group.recomputed_copies.get(n, n) for n in storages_read_by(inside)}
    return {n for n in read if n.op == "placeholder" or producer(n) not in inside}


def moved_bytes(group: FusionGroup) -> int:
    """Return the bytes that a group reads from memory and writes to it."""
    return sum(map(node_bytes, (*group.written, *tensors_read(group))))


def set_dependencies(joint: CompiledJointGraph, groups: Sequence[FusionGroup]) -> None:
    """Set `dependencies` of each group: the groups that write the tensors that it reads. Where an
    operation mutates a tensor, it follows the groups that read the tensor before, and later readers
    follow it. Operations that sample a random generator follow one another."""
    writer = {node: index for index, group in enumerate(groups) for node in group.written}
    for group in groups:
        group.dependencies = {writer[n] for n in tensors_read(group) if n in writer}
    mutated = {storage_base(n) for call in joint.operations for n in mutated_args(call)}
    readers: dict[fx.Node, set[int]] = {}
    last_mutation: dict[fx.Node, int] = {}
    groups_of: dict[fx.Node, set[int]] = {}
    for index, group in enumerate(groups):
        for node in group.all_nodes:
            groups_of.setdefault(node, set()).add(index)
    last_sample: int | None = None
    for node in _random_operations_in_order(joint):
        for index in groups_of.get(node, ()):  # one group at most: the operation runs once
            if last_sample is not None and last_sample != index:
                groups[index].dependencies.add(last_sample)
            last_sample = index
    for node in joint.operations:
        mutated_here = {storage_base(n) for n in mutated_args(node)}
        for storage in mutated.intersection(map(storage_base, node.all_input_nodes)):
            indices = groups_of.get(node, set())
            for index in indices:
                if storage in last_mutation:
                    groups[index].dependencies |= {last_mutation[storage]} - {index}
                if storage in mutated_here:
                    groups[index].dependencies |= readers.get(storage, set()) - {index}
                    last_mutation[storage] = index
            readers.setdefault(storage, set()).update(indices)


def _random_operations_in_order(joint: CompiledJointGraph) -> list[fx.Node]:
    """Return the operations that sample random generators, in the order in which torch.compile runs
    them: the order of Inductor's kernels; with `fallback_random`, or where the kernels do not name
    all of them, the order of the graph, which Inductor then keeps."""
    samples = list(filter(samples_generator, joint.operations))
    index_of = _kernel_indices(joint)
    if config.fallback_random or not index_of.keys() >= set(samples):
        return samples
    return sorted(samples, key=index_of.__getitem__)


def _topological_order(
    groups: Sequence[FusionGroup], kernel_indices: Sequence[int], last_positions: Sequence[int]
) -> tuple[list[FusionGroup], set[int]]:
    """Return the groups in execution order, and the indices of the groups that a dependency cycle
    leaves out.

    `kernel_indices` has the index of each group's kernel, and `last_positions` the position of its
    last operation in the joint graph. Each group follows its dependencies. Among the groups that
    are ready, the forward comes first, then the lower kernel index, then the lower position of the
    last operation. A group without a kernel index (-1) takes the highest of its dependencies.
    """
    dependents: list[list[int]] = [[] for _ in groups]
    for index, group in enumerate(groups):
        for dependency in group.dependencies:
            dependents[dependency].append(index)
    missing = [len(group.dependencies) for group in groups]
    ranks = list(kernel_indices)
    ready: list[tuple[bool, int, int, int]] = []

    def add_ready(index: int) -> None:
        group = groups[index]
        if ranks[index] < 0:
            ranks[index] = max((ranks[before] for before in group.dependencies), default=-1)
        heapq.heappush(ready, (group.is_backward, ranks[index], last_positions[index], index))

    for index, count in enumerate(missing):
        if not count:
            add_ready(index)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)[-1]
        order.append(index)
        for dependent in dependents[index]:
            missing[dependent] -= 1
            if not missing[dependent]:
                add_ready(dependent)
    return [groups[index] for index in order], set(range(len(groups))).difference(order)


_RANDOM_S, _MASK_WRITE_S, _MASK_READ_S = 7.5e-9, 8e-9, 2.8e-9
"""Seconds of one core for one random number, one mask element written, and one read (measured with
torch 2.13 on x86-64 with AVX-512, 2026; `docs/decisions/0010`)."""


def scalar_work_s(group: FusionGroup) -> float:
    """Return the seconds of one core for random numbers and boolean masks of a fusion group on the
    CPU; 0 on GPUs."""
    return scalar_operations_s(group.all_nodes, group.written, tensors_read(group))


def scalar_operations_s(
    operations: Iterable[fx.Node], written: Iterable[fx.Node], read: Iterable[fx.Node]
) -> float:
    """Return the seconds of one core for random numbers among the outputs of `operations`, and for
    boolean masks among the tensors `written` and `read`. Only tensors on the CPU count."""
    return (
        _RANDOM_S * sum(_num_cpu_elements(n) for n in operations if is_seeded_random(n))
        + _MASK_WRITE_S * sum(_num_cpu_elements(n, torch.bool) for n in written)
        + _MASK_READ_S * sum(_num_cpu_elements(n, torch.bool) for n in read)
    )


def _num_cpu_elements(node: fx.Node, dtype: torch.dtype | None = None) -> int:
    """Return the number of elements of a node's CPU tensors, of one dtype or of all."""
    tensors = (t for t in output_tensors(node) if t.device.type == "cpu")
    return sum(num_elements(t) for t in tensors if dtype in (None, t.dtype))
