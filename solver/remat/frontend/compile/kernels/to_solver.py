"""Convert fusion groups to a `Graph`: the form that the solver, the simulator and the views read.

An operation of the graph is a fusion group, a value a tensor that its kernel writes to memory. A
tensor that is used only inside of a kernel is no value, and recomputing it there costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from remat.costs.trace_costs import MIN_COST_S
from remat.documents.targets import BOUNDARY_NAME
from remat.frontend.common.aliases import storage_base
from remat.frontend.compile.joint.fx_utils import (
    PIECE_KEY,
    is_recomputable,
    is_symbolic_scalar,
    module_path,
    node_bytes,
    num_elements,
    output_tensors,
    samples_generator,
    storages_read_by,
)
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.cost_model import GroupCost
from remat.frontend.compile.kernels.fusion_groups import FusionGroup, moved_bytes, tensors_read
from remat.frontend.compile.kernels.in_place import overwritable_tensors, with_overwrites
from remat.graph import Graph, Operation, Value
from remat.limits.outputs import OUTPUTS_HELD

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
                name=_unique_name(group, used_names),
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
    """Return for each output the inputs into whose memory Inductor may write it, as values."""
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


def _unique_name(group: FusionGroup, used_names: set[str]) -> str:
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


def unmeasured_workspace_bytes(problem: CompileProblem) -> int:
    """Return the largest workspace of the extern kernels that cannot be measured in the layouts
    that Inductor selects: then that of the operation counts."""
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
