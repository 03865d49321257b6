"""Build the joint graph that remat plans on, from the one that AOTAutograd traces.

torch's own partitioner splits it first. So a plan without recomputation is what torch.compile runs
anyway, including the cheap recomputation that it does in the backward. Then both halves are joined
again: the backward reads the forward's nodes, so that remat may recompute more of the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx
from torch._inductor import config

from remat.frontend.common.aliases import mutated_args, storage_base
from remat.frontend.compile.compat import (
    inputs_mutated_after_forward,
    is_tangent,
    min_cut_partition,
)
from remat.frontend.compile.joint.fx_utils import node_bytes, output_tensors
from remat.frontend.compile.joint.joint_graph import (
    CompiledJointGraph,
    FxKernel,
    donated_tangent_bytes,
    retained_outputs,
)
from remat.frontend.compile.joint.probe_result import (
    InductorKernel,
    InputLifetimes,
    KernelProbe,
    ProbeResult,
)
from remat.limits.outputs import OUTPUTS_HELD


def build_joint_graph(
    module: fx.GraphModule,
    inputs: Sequence[object],
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
    probe: KernelProbe | None,
    rewrite_half: Callable[[fx.GraphModule], None] | None = None,
    outputs: str = OUTPUTS_HELD,
) -> CompiledJointGraph:
    """Build the joint graph of a step from AOTAutograd's, which is modified.

    `probe` returns the kernels of each half; None where the graphs run without Inductor.
    `rewrite_half` applies rewrites of Inductor to a half in advance. `outputs` is "held" or
    "dropped": what the caller does with the forward's outputs.
    """
    for node in module.graph.nodes:  # torch.utils.checkpoint's marks: the plan decides instead
        node.meta.pop("recompute", None)
    output_meta = dict(module.graph.output_node().meta)
    mutated_names = {node.name for node in inputs_mutated_after_forward(module)}
    old_placeholders = [(n.name, n) for n in module.graph.nodes if n.op == "placeholder"]
    halves = min_cut_partition(module, inputs, num_fwd_outputs, static_lifetime_input_indices)
    if rewrite_half is not None:
        for half in halves:
            rewrite_half(half)
    graph = fx.Graph()
    by_name: dict[str, fx.Node] = {name: graph.node_copy(node) for name, node in old_placeholders}
    placeholders = tuple(by_name.values())
    constants: dict[object, fx.Node] = {}
    returned: list[tuple[Any, ...]] = []
    operations: list[fx.Node] = []
    kernels: list[FxKernel] = []
    probes: list[ProbeResult] = []
    num_forward = 0
    saved_tensors: tuple[fx.Node, ...] = ()
    backward_inputs: InputLifetimes | None = None
    is_plain_correct = True
    mutated = {by_name[name] for name in mutated_names}
    for is_backward, half in enumerate(halves):
        joint_node: dict[fx.Node, fx.Node] = {}
        for node in half.graph.nodes:
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
        if probe is not None:
            forward_outputs = returned[0][:num_fwd_outputs]
            retained = retained_outputs(forward_outputs, outputs) if is_backward else ()
            backward_inputs = _input_lifetimes(
                joint_node, placeholders, forward_outputs, returned[-1], retained
            )
            probes.append(probe(half, backward_inputs, probes[0] if probes else None))
            nodes = {node.name: joint for node, joint in joint_node.items()}
            kernels += [_fx_kernel(kernel, nodes) for kernel in probes[-1].kernels]
    mutated.update(storage_base(n) for call in operations for n in mutated_args(call))
    return CompiledJointGraph(
        module=module,
        placeholders=placeholders,
        operations=tuple(operations),
        num_forward=num_forward,
        forward_outputs=returned[0][:num_fwd_outputs],
        gradients=returned[1],
        saved_tensors=saved_tensors,
        kernels=None if probe is None else tuple(kernels),
        probe_results=tuple(probes),
        mutated=frozenset(mutated),
        output_meta=output_meta,
        plain_halves=None if probe is None or not is_plain_correct else halves,
        backward_inputs=backward_inputs,
        batch_copy_bytes=_batch_copy_bytes(placeholders, static_lifetime_input_indices or ()),
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
    """Return the lifetimes of a half's inputs. `joint_node` has the joint graph's node of each node
    of the half, `returned` what the half returns; the caller references the storages `retained`."""
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
    """Return the inputs of a half that it may overwrite, by torch's rule for donated buffers:
    saved tensors that are not outputs of the forward and whose storage no other input shares."""
    returned = {storage_base(n) for n in forward_outputs if isinstance(n, fx.Node)}
    num_inputs = Counter(bases.values())
    return {
        name
        for name, base in bases.items()
        if num_inputs[base] == 1 and base.op != "placeholder" and base not in returned
    }


def _fx_kernel(kernel: InductorKernel, nodes: Mapping[str, fx.Node]) -> FxKernel:
    """Return a kernel in terms of the joint graph's nodes. `nodes` has them by the names that the
    half gives them; names of other nodes are left out."""
    written, origins = (
        tuple(nodes[name] for name in names if name in nodes and nodes[name].op == "call_function")
        for names in (kernel.written, kernel.origins)
    )
    in_place_pairs = tuple(
        (storage_base(nodes[output]), storage_base(nodes[input_]))
        for output, input_ in kernel.in_place_pairs
        if output in nodes and input_ in nodes
    )
    return FxKernel(written, origins, kernel.is_extern, kernel.workspace_bytes, in_place_pairs)
