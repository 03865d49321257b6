"""`JointGraph`: forward and backward of a training step as one graph of functional operators; and
`JointGraphReader`, which reads its nodes, in their order, into a `TraceBuilder`."""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import fx

from remat.documents.arguments import Ref
from remat.documents.records import Node, Output, Placeholder, Result
from remat.documents.targets import WRITE_TARGET
from remat.errors import TraceError
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.reading.gradients import add_gradients
from remat.frontend.capture.reading.mutations import (
    BATCH_NORM_BACKWARDS,
    BATCH_NORM_TRAINING_INDEX,
    add_buffer_write,
    forbid_batch_norm_recomputation,
)
from remat.frontend.capture.reading.trace_builder import TraceBuilder
from remat.frontend.capture.symbol_values import SymbolValues
from remat.frontend.common.torch_modes import capture_paused
from remat.frontend.common.writes import write

_FUNCTIONAL_COPY = "aten.copy.default"
_MSE_LOSS = "aten.mse_loss.default"

MAX_CONSTANT_BYTES = 1 << 20
"""Tensor constants in the model's code are part of the trace; larger ones must be buffers."""


@dataclass(frozen=True)
class GraphInput:
    """A tensor that the step reads, by the `kind` and `target` of its `Placeholder`."""

    kind: str
    target: str


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The forward and backward of a training step as functional operators.

    The `val` of a node is its fake tensor, or several; `module` is the path of the module that it
    belongs to, and `is_backward` is True if it was recorded after the forward (operators only).
    `constants` are real tensors, by the target of their `get_attr` node. `inputs` says what each
    placeholder is. `writes` are pairs of an input and its new value, which the forward leaves in
    it; `gradients` are pairs of an input and its gradient. `outputs` are the outputs of the model.
    `sources` has for each item of `gradients` the indices of the outputs that depend on the input.
    `frees` are the nodes whose storages eager mode frees after each node.
    """

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[fx.Node, GraphInput]
    writes: Sequence[tuple[fx.Node, fx.Node]]
    outputs: Sequence[fx.Node]
    gradients: Sequence[tuple[fx.Node, fx.Node]]
    sources: Sequence[frozenset[int]]
    frees: Mapping[fx.Node, Sequence[fx.Node]] = field(default_factory=dict)


class JointGraphReader:
    """Reader of one joint graph. `read` fills `builder` with the records of the trace."""

    def __init__(self, joint: JointGraph, flat_model: FlatModel, values: SymbolValues) -> None:
        self.joint = joint
        self.flat_model = flat_model
        self.builder = TraceBuilder(value_of=values.concrete)
        self._placeholder_by_id: dict[int, Placeholder] = {}
        """The one placeholder of each parameter, by the parameter's `id`."""
        self._placeholder_by_node: dict[fx.Node, Placeholder] = {}
        self._allocated: dict[int, str] = {}
        """The name of the tensor that each storage was allocated for."""
        self._forward = self._forward_nodes()

    def read(self) -> None:
        """Read the whole graph: its nodes, then buffer writes, outputs and gradients."""
        for node in self.joint.graph.nodes:
            match node.op:
                case "placeholder":
                    self._read_placeholder(node)
                case "get_attr":
                    self._read_constant(node)
                case "call_function":
                    self._read_call(node)
        for node, value in self.joint.writes:
            add_buffer_write(
                self.builder, self._placeholder_by_node[node], self.builder.tensor_name(value)
            )
        forbid_batch_norm_recomputation(self.builder)
        self._read_outputs()
        add_gradients(
            self.builder,
            [
                (self._placeholder_by_node[node], self.builder.tensor_name(gradient), sources)
                for (node, gradient), sources in zip(
                    self.joint.gradients, self.joint.sources, strict=True
                )
            ],
        )

    # -- forward and backward ---------------------------------------------------------------

    def _forward_nodes(self) -> set[fx.Node]:
        """Return the nodes of the forward: all that were recorded in it, and the ancestors of its
        outputs and buffer writes (functionalization may record a view of a write later). Those that
        only the backward reads are among them, such as the gradients that a fused loss computes in
        its forward: eager mode runs them there, and delayed they would retain what they read."""
        stack = [*self.joint.outputs, *(value for _, value in self.joint.writes)]
        stack += [
            node
            for node in self.joint.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
            if not node.meta["is_backward"]
        ]
        forward: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in forward:
                forward.add(node)
                stack.extend(node.all_input_nodes)
        return forward

    # -- graph inputs -----------------------------------------------------------------------

    def _read_placeholder(self, node: fx.Node) -> None:
        kind, target = astuple(self.joint.inputs[node])
        tensor = node.meta["val"]
        parameter = self.flat_model.parameters_by_name[target] if kind == "parameter" else None
        if (tied := self._placeholder_by_id.get(id(parameter))) is not None:
            self.builder.arguments[node] = Ref(tied.name)
            self._placeholder_by_node[node] = tied
            return
        placeholder = self.builder.read_input(
            node,
            tensor,
            kind=kind,
            target=target,
            requires_grad=self._requires_grad(kind, target),
            aliases=self._other_names(parameter, target),
        )
        self._placeholder_by_node[node] = placeholder
        if parameter is not None:
            self._placeholder_by_id[id(parameter)] = placeholder

    def _requires_grad(self, kind: str, target: str) -> bool:
        if kind == "input":
            return self.flat_model.output_info.inputs_require_grad[int(target)]
        return kind == "parameter" and self.flat_model.parameters_by_name[target].requires_grad

    def _other_names(self, parameter: torch.Tensor | None, target: str) -> tuple[str, ...]:
        if parameter is None:
            return ()
        items = self.flat_model.parameters_by_name.items()
        return tuple(name for name, p in items if p is parameter and name != target)

    def _read_constant(self, node: fx.Node) -> None:
        tensor = self.joint.constants[str(node.target)]
        size_bytes = tensor.untyped_storage().nbytes()
        if size_bytes > MAX_CONSTANT_BYTES:
            raise TraceError(
                f"the model's code uses a constant tensor of {size_bytes} bytes (shape "
                f"{tuple(tensor.shape)}), created outside of its forward; a trace includes "
                f"constants of up to {MAX_CONSTANT_BYTES} bytes: register it as a buffer"
            )
        with capture_paused():
            tensor = tensor.detach().contiguous()
            data = bytes(tensor.cpu().reshape(-1).view(torch.uint8).tolist())
        self.builder.read_input(
            node, tensor, kind="constant", target="", data=base64.b64encode(data).decode()
        )

    # -- operations -------------------------------------------------------------------------

    def _read_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # `read_results` names it with the operation that returns the tuple
        target = WRITE_TARGET if node.target is write else str(node.target)
        if node.kwargs.get("generator") is not None:
            raise TraceError(
                f"{target} uses a torch.Generator of the model; use the default generator"
            )
        record = self.builder.read_call(
            node, target, backward=node not in self._forward, module=node.meta["module"]
        )
        if target == _FUNCTIONAL_COPY and not record.view:
            copied = self._with_whole_storage(node, record.results[0])
            record = record.model_copy(update={"results": (copied,)})
        args = record.args
        if target in BATCH_NORM_BACKWARDS and args[BATCH_NORM_TRAINING_INDEX + 2] is True:
            # In training mode it does not read the running statistics: do not retain them for it.
            args = (*args[:3], None, None, *args[5:])
            record = record.model_copy(update={"args": args})
        if "checkpoint" in node.meta:
            fields = {key: node.meta[key] for key in ("checkpoint", "is_saved")}
            record = record.model_copy(update=fields)
        self.builder.nodes.append(record)
        self._allocated.update((r.storage, r.name) for r in record.results if not record.view)
        self._add_freed(self.joint.frees.get(node, ()))
        if target == _MSE_LOSS and not record.results[0].tensor.shape:
            self._add_scalar_copy(node, record.results[0])

    def _add_freed(self, tensors: Sequence[fx.Node]) -> None:
        """Add tensors to those that eager mode frees after the last operation, unless it reads or
        returns them."""
        builder = self.builder
        index = len(builder.nodes) - 1
        while index >= 0 and builder.nodes[index].view:
            index -= 1
        if index < 0 or not tensors:
            return
        record = builder.nodes[index]
        names = (*record.operand_names, *(result.name for result in record.results))
        read = {builder.storage_by_name[name] for name in names}
        arguments = (builder.arguments.get(tensor) for tensor in tensors)
        storages = {builder.storage_by_name[a.name] for a in arguments if isinstance(a, Ref)}
        freed = {self._allocated[s] for s in storages - read if s in self._allocated}
        if freed:
            freed.update(record.frees)
            builder.nodes[index] = record.model_copy(update={"frees": tuple(sorted(freed))})

    def _with_whole_storage(self, node: fx.Node, copied: Result) -> Result:
        """Return the result of `aten.copy` with the size and offset that its kernel produces. It
        clones the whole storage of its first operand, also if that is a view of a part, and returns
        a view of the same part. The fake tensor shows neither."""
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        builder, tensor = self.builder, operand.meta["val"]
        operand_bytes = builder.storage_bytes[builder.storage_index(operand, -1, tensor)]
        copy_bytes = builder.storage_bytes[copied.storage]
        builder.storage_bytes[copied.storage] = max(copy_bytes, operand_bytes)
        offset = builder.size(tensor.storage_offset())
        meta = copied.tensor.model_copy(update={"offset": offset})
        builder.meta_by_name[copied.name] = meta
        return copied.model_copy(update={"tensor": meta})

    def _add_scalar_copy(self, node: fx.Node, loss: Result) -> None:
        """Add a copy of a mean squared error, and let all readers use it. The kernel returns its
        scalar in the storage of all the squared errors, which the fake tensor does not show: count
        that storage in full, so that the plan can free it."""
        builder = self.builder
        operands = [n.meta["val"] for n in node.all_input_nodes]
        shapes = (map(builder.size, t.shape) for t in operands)
        shape = torch.broadcast_shapes(*map(tuple, shapes))
        builder.storage_bytes[loss.storage] = math.prod(shape) * node.meta["val"].element_size()
        scalar = builder.new_dense_result(f"{loss.name}_scalar", loss.tensor, ())
        self.builder.arguments[node] = Ref(scalar.name)
        builder.existing_storages.add(scalar.storage)
        clone = Node(
            name=scalar.name,
            target="aten.clone.default",
            args=(Ref(loss.name),),
            results=(scalar,),
            backward=node not in self._forward,
            module=builder.nodes[-1].module,
        )
        builder.nodes.append(clone)

    # -- outputs ----------------------------------------------------------------------------

    def _read_outputs(self) -> None:
        tangents = {p.target: p.name for p in self.builder.placeholders if p.kind == "tangent"}
        info = self.flat_model.output_info
        for index, node in enumerate(self.joint.outputs):
            tangent = tangents.get(str(index), "") if info.differentiated[index] else ""
            self.builder.outputs.append(
                Output(
                    name=self.builder.tensor_name(node),
                    differentiable=info.requires_grad[index],
                    tangent=tangent,
                    is_stored=not info.returned[index],
                )
            )
