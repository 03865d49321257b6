"""Convert a schedule to the forward and backward fx graphs that torch compiles.

Each run of the schedule becomes a copy of the nodes of its fusion group, in the schedule's order.
Views are copied where they are read. Each run is numbered in the `meta` of its nodes, so that
Inductor makes one kernel of it (`inductor/fusion_control.py`). The graphs of plain torch.compile
are only marked, so that their peak is verified, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from remat.frontend.common.aliases import is_getitem, producer, storage_base
from remat.frontend.compile.compat import extract_forward_backward
from remat.frontend.compile.fx_utils import (
    is_concatenated,
    is_elementwise,
    is_extern_convolution,
    is_symbolic_scalar,
    node_bytes,
    output_tensors,
)
from remat.frontend.compile.inductor.copy_operators import (
    COPY_OPERATORS,
    INPUTS_KEY,
    fake_handle,
)
from remat.frontend.compile.inductor.fusion_control import PLAIN_KEY, RUN_KEY, materialize
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import FusionGroup
from remat.frontend.compile.kernels.problem import (
    CompileProblem,
    TensorCopy,
    unmeasured_workspace_bytes,
)
from remat.frontend.compile.registry import CompiledPlan
from remat.schedule import Schedule


def build_graph_modules(
    problem: CompileProblem,
    compiled: CompiledPlan,
    num_fwd_outputs: int,
    static: Iterable[int],
    *,
    inductor: bool,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Build the forward and the backward module that run exactly the schedule of `compiled`.

    `num_fwd_outputs` is the number of forward outputs, and `static` are the indices of placeholders
    with a fixed address. With `inductor`, each tensor that
    a run writes is marked to be materialized, also outputs of extern kernels: Inductor would
    postpone a matmul until a reduction reads it. Eager mode materializes everything anyway. Sets
    the retained, donated and saved bytes of `compiled`.
    """
    builder = _ScheduledGraphBuilder(problem, compiled, inductor)
    builder.copy_runs(compiled.plan.schedule)
    return builder.split(num_fwd_outputs, static)


def record_retained_tensors(
    compiled: CompiledPlan,
    joint: CompiledJointGraph,
    saved: Collection[fx.Node],
    retained_outputs: Collection[fx.Node],
) -> None:
    """Set the retained, donated and saved bytes and names of a compiled plan. `saved` are the
    tensors that the forward saves, `retained_outputs` the storage bases of the outputs that the
    caller references during the backward."""
    saved_outputs = {n for n in saved if storage_base(n) in retained_outputs}
    unsaved_outputs = set(retained_outputs) - {storage_base(n) for n in saved_outputs}
    tangents = [n for n in joint.tangents if n not in joint.donated_tangents]
    compiled.donated_bytes = {
        node.name: size_bytes for node, size_bytes in joint.donated_tangents.items()
    }
    compiled.retained_names = frozenset(n.name for n in saved_outputs)
    compiled.retained_bytes = sum(map(node_bytes, (*unsaved_outputs, *tangents)))
    computed = {storage_base(n) for n in saved if storage_base(n).op == "call_function"}
    compiled.saved_bytes = sum(map(node_bytes, computed | unsaved_outputs))


class _ScheduledGraphBuilder:
    """The joint graph of a schedule while it is built, run by run."""

    def __init__(self, problem: CompileProblem, compiled: CompiledPlan, inductor: bool) -> None:
        self.problem = problem
        self.compiled = compiled
        self.inductor = inductor
        self.graph = fx.Graph()
        self.copied_once: dict[fx.Node, fx.Node] = {}
        """The copies of placeholders, constants and symbolic scalars, which are copied once."""
        self.latest: dict[fx.Node, fx.Node] = {}
        """The latest copy of each tensor that a kernel writes."""
        self.handles: dict[fx.Node, fx.Node] = {}
        """The latest handle of each tensor that is offloaded."""
        self.forward_nodes: set[fx.Node] = set()
        self.retained_outputs: set[fx.Node] = set()
        """The copies of forward outputs that the caller references during the backward."""
        self.copied_groups: set[int] = set()
        """The ids of the groups that have run."""
        self.recomputed_copies: Mapping[fx.Node, fx.Node] = {}
        """The tensors that the current group reads in place of others."""

    def copy_runs(self, schedule: Schedule) -> None:
        """Copy the nodes of each run of the schedule into the graph, and the outputs of the
        step."""
        joint = self.problem.joint
        for node in joint.placeholders:
            self.copied_once[node] = self._copy_node(node, {})
        outputs: tuple[Any, ...] = ()
        for run, op in enumerate(schedule.runs):
            group = self.problem.groups[op]
            if group is None:
                outputs = self._end_forward_nodes()
            elif isinstance(group, TensorCopy):
                self._add_tensor_copy(group, run)
            else:
                self._copy_group(group, run)
        if self.problem.graph.boundary is None:
            outputs = self._end_forward_nodes()
        output = self.graph.output((*outputs, *self._latest_node_copies(joint.gradients)))
        output.meta.update(joint.output_meta)
        self.graph.eliminate_dead_code()
        self.graph.lint()

    def _end_forward_nodes(self) -> tuple[Any, ...]:
        """Return the copies of the forward outputs. Set the nodes of the forward, which are
        complete, and the outputs that the caller references."""
        outputs = self._latest_node_copies(self.problem.joint.forward_outputs)
        retained = self.problem.retained_outputs
        self.retained_outputs = {storage_base(self.latest[node]) for node in retained}
        self.forward_nodes = set(self.graph.nodes)
        return outputs

    def split(
        self, num_fwd_outputs: int, static: Iterable[int]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward modules of the graph, divided where the backward
        starts."""
        joint = fx.GraphModule(self.problem.joint.module, self.graph)
        gradients = self._gradient_nodes()
        tangents = {self.copied_once[node] for node in self.problem.joint.tangents}
        saved: list[fx.Node] = []
        scalars: list[fx.Node] = []
        objects: list[fx.Node] = []
        for node in self.graph.nodes:
            is_other = node in tangents or node.op in ("output", "get_attr")
            if node not in self.forward_nodes or is_other:
                continue
            is_read_later = any(
                u not in self.forward_nodes and u.op != "output" for u in node.users
            )
            if not is_read_later and node not in gradients:
                continue
            value = node.meta.get("val")
            if is_symbolic_scalar(node) or isinstance(value, (torch.SymInt, torch.SymFloat)):
                scalars.append(node)
            elif any(True for _ in output_tensors(node)):
                if not isinstance(value, (tuple, list)):
                    saved.append(node)
            else:
                objects.append(node)
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        record_retained_tensors(self.compiled, self.problem.joint, saved, self.retained_outputs)
        return extract_forward_backward(
            joint, saved, scalars, objects, num_fwd_outputs, [inputs[i] for i in static]
        )

    def _gradient_nodes(self) -> set[fx.Node]:
        """Return the nodes of the graph that the backward returns as gradients."""
        outputs = self.graph.output_node().args[0]
        assert isinstance(outputs, tuple)
        gradients = outputs[len(self.problem.joint.forward_outputs) :]
        return {node for node in gradients if isinstance(node, fx.Node)}

    # -- one run --------------------------------------------------------------------------------

    def _copy_group(self, group: FusionGroup, run: int) -> None:
        """Copy the nodes of a fusion group for the run with this index, and mark the copies with
        it. A recomputation leaves out the operations with side effects."""
        local: dict[fx.Node, fx.Node] = {}
        is_recomputation = id(group) in self.copied_groups
        self.copied_groups.add(id(group))
        self.recomputed_copies = group.recomputed_copies
        position = self.problem.joint.position
        nodes = (
            group.nodes if is_recomputation else sorted(group.all_nodes, key=position.__getitem__)
        )
        inside = set(nodes)
        unshared: list[fx.Node] = []
        for node in nodes:
            if node in group.unshared_consumers:
                inputs = {
                    n: self._unshared_node_copy(n, inside, local, unshared)
                    for n in node.all_input_nodes
                }
                local[node] = self._copy_node(node, inputs)
            else:
                self._copy_node_into_run(node, local)
            for user in node.users:
                if is_getitem(user):
                    self._copy_node_into_run(user, local)
        for copy in (*local.values(), *unshared):
            copy.meta[RUN_KEY] = (self.compiled.number, run)
        for node in group.written:
            if is_recomputation and node in self.problem.retained_outputs:
                continue  # the first copy is in memory until the backward ends
            written, separate_buffer = local[node], is_concatenated(node)
            # A convolution that is not marked keeps the layout that Inductor selects for it.
            is_marked = separate_buffer or not is_extern_convolution(node)
            if self.inductor and node_bytes(node) and is_marked:
                written = self._materialized(written, run, separate_buffer=separate_buffer)
            self.latest[node] = written
        self.recomputed_copies = {}

    def _add_tensor_copy(self, copy: TensorCopy, run: int) -> None:
        """Add the call that starts or awaits the copy of a tensor to the host or back."""
        kind, node = copy
        tensor = node.meta["val"]
        assert isinstance(tensor, FakeTensor)
        strides = self.problem.joint.strides_in_memory(node)
        with tensor.fake_mode:
            handle, written = fake_handle(), tensor.as_strided(tensor.shape, strides)
        layout = ([*tensor.shape], [*strides], tensor.dtype, tensor.device)
        arguments: tuple[Any, ...]
        match kind:
            case "offload":
                arguments, inputs = (self.latest[node],), (written,)
            case "release":
                arguments, inputs = (self.handles[node], self.latest[node]), (handle, written)
            case "reload":
                arguments, inputs = (self.handles[node],), (handle,)
            case _:
                arguments, inputs = (self.handles[node], *layout), (handle, *layout)
        call = self.graph.call_function(COPY_OPERATORS[kind], arguments)
        run_of_plan = (self.compiled.number, run)
        call.meta = {**node.meta, RUN_KEY: run_of_plan, INPUTS_KEY: (inputs, {})}
        if kind == "arrive":
            self.latest[node] = call
        else:
            call.meta["val"] = handle
            self.handles[node] = call

    def _unshared_node_copy(
        self,
        node: fx.Node,
        inside: set[fx.Node],
        local: dict[fx.Node, fx.Node],
        unshared: list[fx.Node],
    ) -> fx.Node:
        """Return a copy of a node and of the elementwise operations that lead to it, for a single
        consumer: Inductor may write to memory a tensor that two consumers share. Return the shared
        copy for a node that no elementwise operation of the kernel (`inside`) computes. `local` has
        the copies of this run; new ones are added to `unshared`."""
        if producer(node) not in inside or not is_elementwise(producer(node)):
            return self._node_copy_of(node, local)
        inputs = {
            n: self._unshared_node_copy(n, inside, local, unshared) for n in node.all_input_nodes
        }
        unshared.append(self._copy_node(node, inputs))
        return unshared[-1]

    def _materialized(self, node: fx.Node, run: int, *, separate_buffer: bool) -> fx.Node:
        """Return a call that makes Inductor write a node to memory; with `separate_buffer`, to a
        buffer of its own."""
        marked = self.graph.call_function(materialize, (node, separate_buffer))
        marked.meta = {**node.meta, RUN_KEY: (self.compiled.number, run)}
        return marked

    def _copy_node_into_run(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> None:
        """Copy a node with its inputs' copies, and add it to `local`, the copies of this run."""
        local[node] = self._copy_node(
            node, {n: self._node_copy_of(n, local) for n in node.all_input_nodes}
        )

    def _node_copy_of(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return the latest copy of a node that a call reads. A view is copied into this run;
        `local` has the run's copies."""
        node = self.recomputed_copies.get(node, node)
        if node in local:
            return local[node]
        if node.op in ("placeholder", "get_attr") or is_symbolic_scalar(node):
            return self._copy_node_once(node, local)
        if storage_base(node) is node:
            return self.latest[node]
        self._copy_node_into_run(node, local)
        return local[node]

    def _copy_node_once(self, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return the only copy of a placeholder, constant or symbolic scalar; make it first if
        there is none."""
        if node not in self.copied_once:
            inputs = {n: self._node_copy_of(n, local) for n in node.all_input_nodes}
            self.copied_once[node] = self._copy_node(node, inputs)
        return self.copied_once[node]

    def _copy_node(self, node: fx.Node, inputs: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a node with its `meta` into the graph, and return the copy. `inputs` maps its inputs
        to their copies."""
        copy = self.graph.node_copy(node, inputs.__getitem__)
        copy.meta = dict(node.meta)
        return copy

    def _latest_node_copies(self, nodes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the latest copies of nodes; other items, such as None, stay."""
        local: dict[fx.Node, fx.Node] = {}
        return tuple(self._node_copy_of(n, local) if isinstance(n, fx.Node) else n for n in nodes)


def plain_graph_modules(
    problem: CompileProblem, compiled: CompiledPlan
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module of torch's own partitioner, with their nodes
    marked with the number of the plan. Sets the fields of `compiled` with which their peak is
    verified."""
    joint = problem.joint
    assert joint.plain_halves is not None
    assert joint.backward_inputs is not None
    for gm in joint.plain_halves:
        for node in gm.graph.nodes:
            node.meta[PLAIN_KEY] = compiled.number
    compiled.storages = joint.backward_inputs.storages
    compiled.workspace_bytes = unmeasured_workspace_bytes(problem)
    record_retained_tensors(compiled, joint, joint.saved_tensors, problem.retained_outputs)
    compiled.retained_names = frozenset(joint.backward_inputs.retained)
    return joint.plain_halves
