"""The planning problem of a compiled step: its fusion groups as the `Graph` that is solved.

An operation of the graph is a fusion group, a value a tensor that its kernel writes to memory. A
tensor that is used only inside of a kernel is no value, and recomputing it there costs no time.

Inductor may write an output into the memory of an input of the same size that is read for the last
time. The graph names at most one such input for each output, the one that most surely dies there.
Whether it does depends on the schedule, and `remat.simulate` counts the memory accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from remat.choice.offloadable_step import PlannedStays
from remat.costs.devices import Link
from remat.costs.trace_costs import MIN_COST_S
from remat.documents.targets import BOUNDARY_NAME
from remat.frontend.common.aliases import producer, storage_base
from remat.frontend.compile.fx_utils import (
    PIECE_KEY,
    is_extern_convolution,
    is_recomputable,
    is_reduction,
    is_seeded_random,
    is_symbolic_scalar,
    module_path,
    node_bytes,
    num_elements,
    output_tensors,
    samples_generator,
    storages_read_by,
)
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.cost_model import GroupCost
from remat.frontend.compile.kernels.fusion_groups import FusionGroup, moved_bytes, tensors_read
from remat.frontend.compile.registry import UnsplitStep
from remat.graph import Graph, Operation, Value
from remat.limits.options import OUTPUTS_HELD
from remat.passes.offload.copies_in_graph import CopyOperation, OffloadedGraph, offload_values
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import baseline_of

_MAX_NAME_LENGTH = 60


class TensorCopy(NamedTuple):
    """One of the four operations that copy a tensor to the host and back: "offload", "release",
    "reload" or "arrive"."""

    kind: str
    node: fx.Node

    @property
    def waits(self) -> bool:
        """True if the operation waits for a copy, False if it starts one."""
        return self.kind in ("release", "arrive")


@dataclass(frozen=True)
class CompileProblem:
    """The planning problem of a compiled step.

    `groups` has the fusion group of each operation of `graph`, a `TensorCopy` for those that copy
    tensors, and None for the boundary; the tensors that a group writes are the operation's outputs,
    in the same order. `retained_outputs` are the forward outputs that the caller references until
    the backward ends.
    """

    graph: Graph
    joint: CompiledJointGraph
    groups: tuple[FusionGroup | TensorCopy | None, ...]
    retained_outputs: frozenset[fx.Node]


def build_problem(
    joint: CompiledJointGraph,
    groups: list[FusionGroup],
    cost_model: Callable[[FusionGroup, int], GroupCost],
    outputs: str = OUTPUTS_HELD,
) -> CompileProblem:
    """Build the solver's graph of a step. `cost_model` returns the cost of a group that moves a
    number of bytes.

    Forward outputs stay in memory until the end of the backward, or until its start if `outputs` is
    "dropped". Tangents stay in memory as autograd retains them.
    """
    values: list[Value] = []
    value_of: dict[fx.Node, int] = {}

    def add_values(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        for node in nodes:
            value_of[node] = len(values)
            values.append(Value(node.name, node_bytes(node)))
        return tuple(value_of[node] for node in nodes)

    retained = joint.retained_outputs(outputs)
    operations: list[Operation] = []
    group_of: list[FusionGroup | None] = []
    used_names: set[str] = {BOUNDARY_NAME}
    boundary: int | None = None
    for group in groups:
        if group.is_backward and boundary is None:
            boundary = len(operations)
            dropped = tuple(sorted(value_of[n] for n in joint.computed_outputs - retained))
            tangents = add_values(joint.tangents)
            operations.append(
                Operation(BOUNDARY_NAME, dropped, tangents, 0.0, recomputable=False, backward=True)
            )
            group_of.append(None)
        inputs = tuple(sorted(value_of[n] for n in tensors_read(group) if n in value_of))
        written = add_values(group.written)
        reads_no_mutated = joint.mutated.isdisjoint(storages_read_by(group.nodes))
        is_repeatable = reads_no_mutated and all(map(is_recomputable, group.nodes))
        cost = cost_model(group, moved_bytes(group))
        piece_of, piece = group.all_nodes[-1].meta.get(PIECE_KEY, ("", 0))
        operations.append(
            Operation(
                name=_unique_group_name(group, used_names),
                inputs=inputs,
                outputs=written,
                cost_s=max(MIN_COST_S, cost.cost_s),
                workspace_bytes=cost.workspace_bytes,
                backward=group.is_backward,
                recomputable=is_repeatable and bool(written) and not group.is_backward,
                module=module_path(group.all_nodes[-1]),
                order_sensitive=not joint.mutated.isdisjoint(storages_read_by(group.all_nodes))
                or any(map(samples_generator, group.all_nodes)),
                piece_of=piece_of,
                piece=piece,
            )
        )
        group_of.append(group)
    # A gradient may be a view of a parameter or of the batch: it takes no memory of the graph.
    gradients = [storage_base(n) for n in joint.gradients if isinstance(n, fx.Node)]
    retained_tangents = [n for n in joint.tangents if n not in joint.donated_tangents]
    results = {value_of[n] for n in (*gradients, *retained_tangents) if n in value_of}
    results |= {value_of[n] for n in (joint.computed_outputs if boundary is None else retained)}
    graph = Graph(
        tuple(operations),
        tuple(values),
        frozenset(results),
        joint.constant_bytes + joint.layout_copy_bytes,
        boundary,
    )
    in_place_inputs = _in_place_inputs(joint, groups, value_of)
    graph = with_overwrites(graph, in_place_inputs)
    return CompileProblem(graph, joint, tuple(group_of), retained)


def _in_place_inputs(
    joint: CompiledJointGraph, groups: Sequence[FusionGroup], value_of: dict[fx.Node, int]
) -> dict[int, list[int]]:
    """Return the inputs into whose memory Inductor may write an output, by output; both are
    indices of values."""
    candidates: dict[int, list[int]] = {}
    owned_by_caller = joint.computed_outputs.union(joint.tangents)
    writer = {node: group for group in groups for node in group.written}
    pairs = (pair for kernel in joint.kernels or () for pair in kernel.in_place_pairs)
    for output, kernel_input in pairs:
        if output not in writer:
            continue
        group = writer[output]
        overwritable = overwritable_tensors(output, group)
        for read in (kernel_input, *group.inlined.get(kernel_input, ())):
            if read in value_of and read not in owned_by_caller and read in overwritable:
                candidates.setdefault(value_of[output], []).append(value_of[read])
    return candidates


def _unique_group_name(group: FusionGroup, used_names: set[str]) -> str:
    """Return a new name for a group, and add it to `used_names`. A kernel of several operations is
    named as in Inductor, without its number; a single operation by its node."""
    name = group.all_nodes[-1].name
    if group.is_generated and len(group.all_nodes) > 1:
        origins = (node.meta.get("original_aten") for node in group.all_nodes)
        operators = {str(origin) for origin in origins if origin is not None}
        parts = sorted(operator.split(".")[1] for operator in operators if "." in operator)
        if parts:
            name = "fused_" + "_".join(parts)[:_MAX_NAME_LENGTH]
    unique, suffix = name, 0
    while unique in used_names:
        suffix += 1
        unique = f"{name}_{suffix}"
    used_names.add(unique)
    return unique


def limit_saved_bytes(problem: CompileProblem, budget_bytes: int, saved_bytes: int) -> Graph:
    """Return the graph, changed so that at most `saved_bytes` are saved from forward to backward.

    Other graphs of the step run in between, and need the rest of the budget: it is added to the
    graph as workspace of the boundary operation. The graph is returned unchanged if all its outputs
    are scalars (it ends in a loss, so no other graph runs in between), or if there is no rest.
    """
    graph, boundary = problem.graph, problem.graph.boundary
    outputs = [
        node
        for node in problem.joint.forward_outputs
        if isinstance(node, fx.Node) and not is_symbolic_scalar(node)
    ]
    if boundary is None or all(num_elements(t) == 1 for n in outputs for t in output_tensors(n)):
        return graph
    start = graph.operations[boundary]
    boundary_bytes = sum(graph.values[v].size_bytes for v in (*start.inputs, *start.outputs))
    others_bytes = budget_bytes - graph.constant_bytes - boundary_bytes - saved_bytes
    if others_bytes <= 0:
        return graph
    start = replace(start, workspace_bytes=others_bytes)
    before, after = graph.operations[:boundary], graph.operations[boundary + 1 :]
    return replace(graph, operations=(*before, start, *after))


def inductor_baseline_peak_bytes(problem: CompileProblem) -> int | None:
    """Return the peak in bytes without recomputation, according to Inductor's own kernels; None
    without Inductor."""
    joint = problem.joint
    if not joint.probe_results:
        return None
    forward, backward = joint.probe_results
    retained = problem.retained_outputs.difference(map(storage_base, joint.saved_tensors))
    retained |= {n for n in joint.tangents if n not in joint.donated_tangents}
    retained_bytes = sum(map(node_bytes, retained))
    peak_bytes = max(
        forward.peak_bytes, retained_bytes + forward.layout_copy_bytes + backward.peak_bytes
    )
    return joint.constant_bytes + peak_bytes + unmeasured_workspace_bytes(problem)


def unsplit_step(problem: CompileProblem) -> UnsplitStep:
    """Return the step that plain torch.compile would run: the baseline of budgets and times."""
    joint = problem.joint
    baseline = baseline_of(problem.graph)
    peak_bytes = inductor_baseline_peak_bytes(problem) or 0
    if joint.plain_halves is None:
        peak_bytes = max(peak_bytes, baseline.peak_bytes)
    saved = problem.retained_outputs.union(map(storage_base, joint.saved_tensors))
    return UnsplitStep(peak_bytes, sum(map(node_bytes, saved)), baseline.time_s)


def unmeasured_workspace_bytes(problem: CompileProblem) -> int:
    """Return the largest planned workspace, in bytes, of the extern kernels that cannot be measured
    in the layouts that Inductor selects; 0 without such kernels."""
    unmeasured, measured = set[fx.Node](), set[fx.Node]()
    for kernel in problem.joint.kernels or ():
        if kernel.is_extern:
            (unmeasured if kernel.workspace_bytes is None else measured).update(kernel.origins)
    unmeasured -= measured  # the selection of one of several outputs is a kernel, too
    pairs = zip(problem.graph.operations, problem.groups, strict=True)
    return max(
        (
            operation.workspace_bytes
            for operation, group in pairs
            if isinstance(group, FusionGroup)
            and not group.is_generated
            and not unmeasured.isdisjoint(group.nodes)
        ),
        default=0,
    )


def with_overwrites(graph: Graph, in_place_inputs: Mapping[int, Sequence[int]]) -> Graph:
    """Return the graph with `overwrites` set for its backward operations: for each output, one
    input of the same size that is read for the last time. `in_place_inputs` has, for an output, the
    inputs into whose memory it may be written."""
    operations = list(graph.operations)
    for op, operation in enumerate(operations):
        if operation.recomputable or not operation.backward:
            continue
        dying = {
            v
            for v in operation.inputs
            if v not in graph.results and _last_fixed_reader(graph, v) == op
        }
        overwritten: list[int] = []
        for output in operation.outputs:
            size_bytes = graph.values[output].size_bytes
            inputs = in_place_inputs.get(output, ())
            fitting = [v for v in inputs if graph.values[v].size_bytes == size_bytes]
            # Prefer values of the backward: no later recomputation needs these.
            fitting.sort(key=lambda v: not graph.operations[graph.producer[v]].backward)
            if (first := next((v for v in fitting if v in dying), None)) is not None:
                dying.remove(first)
                overwritten.append(first)
        operations[op] = replace(operation, overwrites=tuple(sorted(overwritten)))
    return replace(graph, operations=tuple(operations))


def with_separate_buffers(graph: Graph, separate_buffers: Collection[str]) -> Graph:
    """Return the graph in which the values with these names have memory of their own: the
    operations that write them overwrite no input (their `overwrites` are empty)."""
    operations = (
        replace(operation, overwrites=())
        if any(graph.values[output].name in separate_buffers for output in operation.outputs)
        else operation
        for operation in graph.operations
    )
    return replace(graph, operations=tuple(operations))


def overwritable_tensors(output: fx.Node, group: FusionGroup) -> set[fx.Node]:
    """Return the tensors of a group into whose memory Inductor may write `output`.

    Inductor takes the memory of the input that is read first. It counts random numbers that the
    kernel generates as an input, which has no memory of its own. So only tensors that the loop of
    `output` reads before a random operation of the same size qualify; without such an operation,
    all that the group reads.
    """
    inside = set(group.nodes)
    if not any(is_seeded_random(n) and node_bytes(n) == node_bytes(output) for n in inside):
        return tensors_read(group)
    read_first: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [output]
    while pending:
        node = storage_base(pending.pop())
        if node in seen:
            continue
        seen.add(node)
        read = group.recomputed_copies.get(node, node)
        operation = producer(read)
        if operation not in inside:
            read_first.add(read)
        elif is_seeded_random(operation) and node_bytes(operation) == node_bytes(output):
            break
        elif not is_reduction(operation):  # another loop reads the inputs of reductions
            pending += reversed(operation.all_input_nodes)
    return read_first


def _last_fixed_reader(graph: Graph, value: int) -> int:
    """Return the last reader of a value among the operations that are not recomputable, whose order
    is fixed; -1 without such a reader."""
    consumers = graph.consumers[value]
    return max((op for op in consumers if not graph.operations[op].recomputable), default=-1)


@dataclass(frozen=True)
class OffloadableProblem:
    """The problem of a compiled step as an `OffloadableStep`: its values are the tensors that
    kernels write. `name` is the name of its variant."""

    problem: CompileProblem
    name: str = ""

    def __str__(self) -> str:
        offloads = len(self.problem.graph.renewal)
        return f"{self.name}, {offloads} tensors offloaded" if offloads else self.name

    def graph(self) -> Graph:
        """Return the graph of the problem, as it is solved."""
        return self.problem.graph

    def offloadable_values(self, min_bytes: int) -> list[int]:
        """Return the values of at least `min_bytes` that may be offloaded: dense tensors of
        constant size that the forward computes and does not return, and that nothing mutates. None
        without a backward."""
        problem = self.problem
        graph, joint = problem.graph, problem.joint
        if graph.boundary is None:
            return []
        values: list[int] = []
        for operation, group in zip(graph.operations, problem.groups, strict=True):
            if not isinstance(group, FusionGroup) or operation.backward:
                continue
            for value, node in zip(operation.outputs, group.written, strict=True):
                if (
                    graph.values[value].size_bytes >= min_bytes
                    and value not in graph.results
                    and node not in joint.computed_outputs
                    and node not in joint.mutated
                    and self._fills_storage(node)
                ):
                    values.append(value)
        return values

    def _fills_storage(self, node: fx.Node) -> bool:
        """True if a node is a tensor of constant size that fills its storage, in strides that are
        known in advance. The strides of a convolution are known only if plain torch.compile saves
        it."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return False
        layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if any(not isinstance(number, int) for number in layout) or tensor.storage_offset():
            return False
        joint = self.problem.joint
        strides = joint.strides_in_memory(node)
        is_saved = bool(joint.probe_results) and node.name in joint.probe_results[0].output_strides
        if joint.probe_results and not is_saved and is_extern_convolution(node):
            return False
        written = tensor.as_strided(tensor.shape, strides)
        return bool(torch.ops.aten.is_non_overlapping_and_dense(written))

    def with_stays(self, planned: PlannedStays, link: Link) -> OffloadableProblem:
        """Return the problem with tensors offloaded as `planned`. `link` has the bandwidth of the
        copies."""
        problem = self.problem
        offloaded = self._offloaded_graph(planned, link)
        groups = tuple(
            TensorCopy(source.kind, self._written_node_of(source.value))
            if isinstance(source, CopyOperation)
            else problem.groups[source]
            for source in offloaded.sources
        )
        return replace(self, problem=replace(problem, graph=offloaded.graph, groups=groups))

    def graph_with_stays(self, planned: PlannedStays, link: Link) -> Graph:
        """Return the graph of `with_stays`, without the rest of the problem."""
        return self._offloaded_graph(planned, link).graph

    def _offloaded_graph(self, planned: PlannedStays, link: Link) -> OffloadedGraph:
        """Return the graph with tensors offloaded, and the source of each of its operations."""
        return offload_values(self.problem.graph, planned.stays, link, planned.recomputed_s)

    def _written_node_of(self, value: int) -> fx.Node:
        """Return the node of the tensor that a value of the graph is."""
        graph = self.problem.graph
        producer = graph.producer[value]
        group = self.problem.groups[producer]
        assert isinstance(group, FusionGroup)
        return group.written[graph.operations[producer].outputs.index(value)]

    def with_schedule(self, plan: Plan, schedule: Schedule) -> Plan:
        """Return the plan with another schedule. The peak of torch's allocator is not predicted:
        compiled kernels are verified instead."""
        return replace(plan, schedule=schedule)

    def with_waits(self, waits_s: Mapping[str, float]) -> OffloadableProblem:
        """Return the problem in which the operations that wait for copies cost `waits_s`, by name;
        0 for other names."""
        pairs = zip(self.problem.graph.operations, self.problem.groups, strict=True)
        operations = tuple(
            replace(operation, cost_s=waits_s.get(operation.name, 0.0))
            if isinstance(group, TensorCopy) and group.waits
            else operation
            for operation, group in pairs
        )
        graph = replace(self.problem.graph, operations=operations)
        return replace(self, problem=replace(self.problem, graph=graph))
