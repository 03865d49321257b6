"""The joint graph that remat plans on: forward and backward as torch.compile would run them.

torch's own partitioner splits AOTAutograd's graph first. So a plan without recomputation is what
torch.compile runs anyway, including the cheap recomputation that it does in the backward. Then both
graphs are joined again: the backward reads the forward's nodes, so that remat may recompute more of
the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from remat.frontend.common.aliases import mutated_args, storage_base
from remat.frontend.compile.compat import (
    backward_frees_tangents,
    inputs_mutated_after_forward,
    is_tangent,
    min_cut_partition,
)
from remat.frontend.compile.fx_utils import (
    device_of,
    has_multiple_outputs,
    is_fusible,
    is_matmul,
    is_recomputable,
    is_symbolic_scalar,
    node_bytes,
    num_elements,
    output_tensors,
)
from remat.frontend.compile.inductor.probe import (
    InputLifetimes,
    Kernel,
    ProbeResult,
    fuse_matmul_additions,
    probe_kernels,
)
from remat.limits.options import OUTPUTS_HELD, are_dropped


@dataclass(frozen=True)
class CompiledJointGraph:
    """The joint graph of a step, after torch's min-cut partitioner and Inductor's scheduler.

    The first `num_forward` of the `operations` are the forward; all are in their order of
    execution. `forward_outputs` are returned by the forward and `gradients` by the backward, both
    with the None and scalar entries that torch has there. `saved_tensors` are nodes of the forward
    that the backward reads. `kernels` are Inductor's, in their order, and `probe_results` are the
    forward and the backward as Inductor would run them; None and empty without Inductor. `mutated`
    are the storage bases that some operation, or AOTAutograd after the forward, writes to in place.
    `plain_halves` are the forward and backward graph of plain torch.compile, None without Inductor
    and where they would give wrong results; `backward_inputs` are the lifetimes of their saved
    tensors. `batch_copy_bytes` are copies of the batch that CUDA graphs read; 0 without them.
    `static_indices` are the positions of parameters and buffers among the `primals`.
    """

    module: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    operations: tuple[fx.Node, ...]
    num_forward: int
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    saved_tensors: tuple[fx.Node, ...]
    kernels: tuple[Kernel[fx.Node], ...] | None
    probe_results: tuple[ProbeResult, ...]
    mutated: frozenset[fx.Node]
    output_meta: dict[str, Any]
    plain_halves: tuple[fx.GraphModule, fx.GraphModule] | None = None
    backward_inputs: InputLifetimes | None = None
    batch_copy_bytes: int = 0
    static_indices: frozenset[int] = frozenset()

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """The index of each operation in the order of execution."""
        return {node: index for index, node in enumerate(self.operations)}

    @cached_property
    def device(self) -> torch.device:
        """The device of the step: a GPU, if one of its tensors is there."""
        nodes = (*self.placeholders, *self.operations)
        return device_of(tensor for node in nodes for tensor in output_tensors(node))

    @property
    def computed_outputs(self) -> set[fx.Node]:
        """The storage bases of the forward's outputs that the forward itself computes."""
        return computed_outputs(self.forward_outputs)

    def retained_outputs(self, outputs: str) -> frozenset[fx.Node]:
        """Return the storage bases of the outputs that the caller references until the backward
        ends. `outputs` is "held" or "dropped"."""
        return retained_outputs(self.forward_outputs, outputs)

    @property
    def returned_nodes(self) -> list[fx.Node]:
        """The nodes among the forward's outputs and the gradients, without None and scalars."""
        return [n for n in (*self.forward_outputs, *self.gradients) if isinstance(n, fx.Node)]

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """The placeholders that are gradients of the forward's outputs."""
        return tuple(node for node in self.placeholders if is_tangent(node))

    @cached_property
    def donated_tangents(self) -> dict[fx.Node, int]:
        """The tangents that are freed once they are read, with their bytes. The tangent of the
        loss is not among them: `loss.backward()` holds it."""
        return donated_tangent_bytes(self.tangents, self.gradients)

    @property
    def primals(self) -> tuple[fx.Node, ...]:
        """The placeholders that are parameters, buffers and batch."""
        return tuple(node for node in self.placeholders if not is_tangent(node))

    @property
    def parameters(self) -> list[fx.Node]:
        """The primals that are parameters and buffers. The others are the batch, and what other
        graphs of the step return."""
        return [node for index, node in enumerate(self.primals) if index in self.static_indices]

    @property
    def parameter_gradients(self) -> set[fx.Node]:
        """The storage bases of the gradients of parameters. The backward returns a gradient or None
        for each primal."""
        static = (g for index, g in enumerate(self.gradients) if index in self.static_indices)
        return {storage_base(gradient) for gradient in static if isinstance(gradient, fx.Node)}

    @property
    def primals_bytes(self) -> int:
        """The bytes of parameters, buffers and batch."""
        return sum(map(node_bytes, self.primals))

    @property
    def constant_bytes(self) -> int:
        """The bytes that are allocated during the whole step: parameters, buffers, batch, and the
        copy of the batch that CUDA graphs read."""
        return self.primals_bytes + self.batch_copy_bytes

    @property
    def layout_copy_bytes(self) -> int:
        """The bytes of copies of parameters and batch in another layout. Inductor's forward makes
        them first, and the backward reads most of them."""
        return self.probe_results[0].layout_copy_bytes if self.probe_results else 0

    def strides_in_memory(self, node: fx.Node) -> tuple[int, ...]:
        """Return the strides in which the forward writes a tensor: Inductor's for a constant-size
        output of the forward, else the strides in the graph."""
        saved = self.probe_results[0].output_strides if self.probe_results else {}
        return saved.get(node.name, node.meta["val"].stride())

    def is_generated(self, operation: fx.Node) -> bool:
        """True if Inductor generates the operation's kernel, and so may fuse it. False for an
        extern kernel, and for every operation without Inductor."""
        if self.kernels is None or (
            has_multiple_outputs(operation) and not is_recomputable(operation)
        ):
            return False
        return is_fusible(operation) or operation in self._generated_matmuls

    @cached_property
    def _generated_matmuls(self) -> set[fx.Node]:
        """Matrix products without an extern kernel: those with a vector, on CPUs."""
        generated, extern = set[fx.Node](), set[fx.Node]()
        for kernel in self.kernels or ():
            matmuls = filter(is_matmul, kernel.origins)
            (extern if kernel.is_extern else generated).update(matmuls)
        return generated - extern

    def is_backward(self, operation: fx.Node) -> bool:
        """True if an operation belongs to the backward."""
        return self.position[operation] >= self.num_forward


def computed_outputs(forward_outputs: Iterable[object]) -> set[fx.Node]:
    """Return the storage bases of the forward's outputs that the forward computes: no inputs of the
    step, and no scalars."""
    bases = {storage_base(n) for n in forward_outputs if isinstance(n, fx.Node)}
    return {n for n in bases if n.op == "call_function" and not is_symbolic_scalar(n)}


def retained_outputs(forward_outputs: Iterable[object], outputs: str) -> frozenset[fx.Node]:
    """Return the storage bases of the forward's outputs that the caller references until the
    backward ends.

    `outputs` is "held" or "dropped". A loss is retained even if outputs are dropped.
    """
    computed = computed_outputs(forward_outputs)
    losses = (n for n in computed if all(num_elements(t) == 1 for t in output_tensors(n)))
    return frozenset(losses if are_dropped(outputs) else computed)


def donated_tangent_bytes(
    tangents: Iterable[fx.Node], gradients: Iterable[object]
) -> dict[fx.Node, int]:
    """Return the tangents that are freed once they are read, with their bytes: tangents with more
    than one element that the backward does not return as a gradient. Empty for versions of torch
    that hold all tangents until the backward ends."""
    if not backward_frees_tangents():
        return {}
    returned = {storage_base(n) for n in gradients if isinstance(n, fx.Node)}
    donated = (n for n in tangents if any(num_elements(t) > 1 for t in output_tensors(n)))
    return {n: node_bytes(n) for n in donated if n not in returned}


def build_joint_graph(
    module: fx.GraphModule,
    inputs: Sequence[object],
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
    outputs: str = OUTPUTS_HELD,
    *,
    inductor: bool,
) -> CompiledJointGraph:
    """Build the joint graph of a step from AOTAutograd's, which is modified.

    With `inductor`, the graph has the kernels that Inductor would run. `outputs` is "held" or
    "dropped": what the caller does with the forward's outputs.
    """
    for node in module.graph.nodes:  # torch.utils.checkpoint's marks: the plan decides instead
        node.meta.pop("recompute", None)
    output_meta = dict(module.graph.output_node().meta)
    mutated_names = {node.name for node in inputs_mutated_after_forward(module)}
    old_placeholders = [(n.name, n) for n in module.graph.nodes if n.op == "placeholder"]
    graph_modules = min_cut_partition(
        module, inputs, num_fwd_outputs, static_lifetime_input_indices
    )
    if inductor:
        for gm in graph_modules:
            fuse_matmul_additions(gm)
    graph = fx.Graph()
    by_name: dict[str, fx.Node] = {name: graph.node_copy(node) for name, node in old_placeholders}
    placeholders = tuple(by_name.values())
    constants: dict[object, fx.Node] = {}
    returned: list[tuple[Any, ...]] = []
    operations: list[fx.Node] = []
    kernels: list[Kernel[fx.Node]] = []
    probes: list[ProbeResult] = []
    num_forward = 0
    saved_tensors: tuple[fx.Node, ...] = ()
    backward_inputs: InputLifetimes | None = None
    is_plain_correct = True
    mutated = {by_name[name] for name in mutated_names}
    for is_backward, gm in enumerate(graph_modules):
        joint_node: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                joint_node[node] = by_name[str(node.target)]
            elif node.op == "get_attr":
                if node.target not in constants:
                    constants[node.target] = graph.node_copy(node)
                joint_node[node] = constants[node.target]
            elif node.op == "output":
                returned.append(fx.map_arg(tuple(node.args[0]), joint_node.__getitem__))  # type: ignore[arg-type]
            elif (
                is_backward
                and any(storage_base(joint_node[n]) in mutated for n in node.all_input_nodes)
                and (forward_node := by_name.get(node.name)) is not None
                and forward_node.target == node.target
            ):
                # torch 2.13 recomputes reads of a buffer from its mutated value: read the forward's
                joint_node[node] = forward_node
                is_plain_correct = False
            else:
                joint_node[node] = graph.node_copy(node, joint_node.__getitem__)
                operations.append(joint_node[node])
                by_name.setdefault(node.name, joint_node[node])
        if is_backward:
            reads = {n for call in operations[num_forward:] for n in call.all_input_nodes}
            saved_tensors = tuple(n for n in operations[:num_forward] if n in reads)
        else:
            num_forward = len(operations)
            mutated |= {storage_base(n) for call in operations for n in mutated_args(call)}
        if inductor:
            forward_outputs = returned[0][:num_fwd_outputs]
            retained = retained_outputs(forward_outputs, outputs) if is_backward else ()
            backward_inputs = _input_lifetimes(
                joint_node, placeholders, forward_outputs, returned[-1], retained
            )
            probes.append(probe_kernels(gm, backward_inputs, probes[0] if probes else None))
            nodes = {node.name: joint for node, joint in joint_node.items()}
            kernels += [_kernel_of_joint_nodes(kernel, nodes) for kernel in probes[-1].kernels]
    mutated.update(storage_base(n) for call in operations for n in mutated_args(call))
    return CompiledJointGraph(
        module=module,
        placeholders=placeholders,
        operations=tuple(operations),
        num_forward=num_forward,
        forward_outputs=returned[0][:num_fwd_outputs],
        gradients=returned[1],
        saved_tensors=saved_tensors,
        kernels=tuple(kernels) if inductor else None,
        probe_results=tuple(probes),
        mutated=frozenset(mutated),
        output_meta=output_meta,
        plain_halves=graph_modules if inductor and is_plain_correct else None,
        backward_inputs=backward_inputs,
        batch_copy_bytes=_batch_copy_bytes(placeholders, static_lifetime_input_indices or ()),
        static_indices=frozenset(static_lifetime_input_indices or ()),
    )


def _batch_copy_bytes(placeholders: Sequence[fx.Node], static: Collection[int]) -> int:
    """Return the bytes of inputs that Inductor copies before it launches a CUDA graph: all on the
    GPU but those at the positions `static`, which are parameters and buffers; 0 without CUDA
    graphs."""
    if not config.triton.cudagraphs:
        return 0
    primals = [node for node in placeholders if not is_tangent(node)]
    batch = [node for index, node in enumerate(primals) if index not in static]
    return sum(node_bytes(node) for node in batch if any(t.is_cuda for t in output_tensors(node)))


def _input_lifetimes(
    joint_node: Mapping[fx.Node, fx.Node],
    placeholders: Sequence[fx.Node],
    forward_outputs: Sequence[object],
    returned: Sequence[object],
    retained: Collection[fx.Node],
) -> InputLifetimes:
    """Return the lifetimes of the inputs of a forward or backward graph. `joint_node` maps its
    nodes to nodes of the joint graph, `returned` are its outputs, and `retained` the storage bases
    that the caller references."""
    bases = {n.name: storage_base(joint_node[n]) for n in joint_node if n.op == "placeholder"}
    # Parameters, and views of them, are allocated during the whole step.
    primals = {n for n in placeholders if not is_tangent(n)}
    storages = {
        name: (base.name, 0 if base in primals else node_bytes(base))
        for name, base in bases.items()
    }
    donated = donated_tangent_bytes(filter(is_tangent, bases.values()), returned)
    donated_bytes = {node.name: size_bytes for node, size_bytes in donated.items()}
    return InputLifetimes(
        storages,
        _overwritable_inputs(bases, forward_outputs),
        donated_bytes,
        frozenset(name for name, base in bases.items() if base in retained),
    )


def _overwritable_inputs(
    bases: Mapping[str, fx.Node], forward_outputs: Sequence[object]
) -> set[str]:
    """Return the names of the inputs that a forward or backward graph may overwrite, by torch's
    rule for donated buffers: saved tensors that are not outputs of the forward and whose storage no
    other input shares. `bases` has the storage base of each input."""
    returned = {storage_base(n) for n in forward_outputs if isinstance(n, fx.Node)}
    num_inputs = Counter(bases.values())
    return {
        name
        for name, base in bases.items()
        if num_inputs[base] == 1 and base.op != "placeholder" and base not in returned
    }


def _kernel_of_joint_nodes(kernel: Kernel[str], nodes: Mapping[str, fx.Node]) -> Kernel[fx.Node]:
    """Return a kernel in terms of the joint graph's nodes. `nodes` has them by their names in the
    forward or backward graph; names that are not in `nodes` are left out."""
    written, origins = (
        tuple(nodes[name] for name in names if name in nodes and nodes[name].op == "call_function")
        for names in (kernel.written, kernel.origins)
    )
    in_place_pairs = tuple(
        (storage_base(nodes[output]), storage_base(nodes[input_]))
        for output, input_ in kernel.in_place_pairs
        if output in nodes and input_ in nodes
    )
    return Kernel(written, origins, kernel.is_extern, kernel.workspace_bytes, in_place_pairs)
