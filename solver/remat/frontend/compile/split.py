"""Splitting the largest operations of AOTAutograd's joint graph: as a trace, and back.

The graph is described by a `Trace`, on which `passes.split` works, and the new operations become
fx nodes. Sums are added by functional operations, and rows are joined by one concatenation:
Inductor decides which of them write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from remat.choice.candidates import split_rounds
from remat.documents.arguments import Ref
from remat.documents.records import Node
from remat.documents.targets import ADD_PRODUCT_TARGET, ADD_TARGET, WRITE_ROWS_TARGET
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.capture.reading.trace_builder import TraceBuilder, identifier
from remat.frontend.common.aliases import is_getitem, mutated_args
from remat.frontend.common.graph_writer import GraphWriter
from remat.frontend.common.operators import resolve_operator
from remat.frontend.compile.compat import is_tangent
from remat.frontend.compile.fx_utils import PIECE_KEY, copy_fx_graph, module_path
from remat.graph import Split
from remat.passes.split.moved_slices import MOVED_SUFFIX
from remat.passes.split.obstacle import split_obstacle

_COPIED_META = (
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "original_aten",
    "from_node", "seq_nr", "partitioner_tag", "custom",
)  # fmt: skip
"""Items of `meta` that the nodes of pieces copy from the node that was split."""

_FUNCTIONAL_TARGETS = {ADD_TARGET: "aten.add.Tensor", ADD_PRODUCT_TARGET: "aten.addmm.default"}
"""The functional operators of the calls that add a piece to a sum in place."""

_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

_LARGE_SHARE = 0.9
"""The share of the largest tensor's memory from which a tensor is nearly as large."""

_MIN_NODE_LIMIT = 2_000
"""The lower bound of the limit on the operations and views of a region's pieces: in a small graph,
nearly all operations may be in pieces."""


def split_joint_graph(
    module: fx.GraphModule, num_fwd_outputs: int, pieces: int, *, is_auto: bool = False
) -> tuple[fx.GraphModule, tuple[Split, ...], str]:
    """Return the joint graph with its largest operations in `pieces` pieces, what was split, and
    why the logits are not, "" if that is not known.

    If remat selected the number of pieces (`is_auto`), the pieces of a region have at most as many
    operations and views in total as the graph, or `_MIN_NODE_LIMIT` if that is more. A region of
    nearly the whole network, such as a U-Net split by samples, would exceed the time limit. Raises
    `CannotSplit` if no rule applies, or the graph has symbolic sizes.
    """
    module = fx.GraphModule(module, copy_fx_graph(module.graph))
    try:
        _restore_stacks(module.graph)
        trace = _joint_graph_to_trace(module, num_fwd_outputs)
        max_nodes = max(_MIN_NODE_LIMIT, len(trace.nodes)) if is_auto else inf
        split = _split_in_rounds(trace, pieces, max_nodes)
    except (RematError, ValueError) as error:  # a ValueError: it cannot be described by a trace
        raise CannotSplit(str(error)) from error
    if split is trace:
        raise CannotSplit(split_obstacle(trace, trace))
    graph = _SplitGraphWriter(module, split).write()
    splits = tuple(record.to_split() for record in split.splits)
    return fx.GraphModule(module, graph), splits, split_obstacle(trace, split)


def _split_in_rounds(trace: Trace, pieces: int, max_nodes: float) -> Trace:
    """Return the trace after rounds of splitting its largest operations, up to the first round
    after which no tensor is nearly as large as the largest of the unsplit step, such as the logits
    of a second model. Returns the same trace if nothing can be split."""
    names = {node.name for node in trace.nodes}
    least_bytes = _LARGE_SHARE * _largest_tensor_bytes(trace, names)
    split = trace
    # Kernels get their costs later, so the rounds need no measured operations.
    for split in split_rounds(trace, pieces, lambda unmeasured: unmeasured, max_nodes):
        if _largest_tensor_bytes(split, names) < least_bytes:
            break
    return split


def _largest_tensor_bytes(trace: Trace, names: Collection[str]) -> int:
    """Return the bytes of the largest tensor that operations with these names produce as a whole
    and the step does not return."""
    returned = {trace.storage_of[item.name] for item in (*trace.outputs, *trace.gradients)}
    nodes = [node for node in trace.nodes if node.name in names and not node.view]
    produced = {result.storage for node in nodes for result in node.results}
    return max((trace.storage_bytes[storage] for storage in produced - returned), default=0)


def _restore_stacks(graph: fx.Graph) -> None:
    """Replace each decomposed stack, a `cat` that is read only through views that separate the
    tensors into a new dimension, by a `cat` of unsqueezed tensors. The rows of each tensor are then
    rows of the result, too. Modifies `graph`. A stack in another memory layout, or of symbolic
    sizes, stays as it is."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        tensors, dimension = node.args[0], node.args[1] if len(node.args) > 1 else 0
        values = [tensor.meta["val"] for tensor in tensors]
        shape = list(values[0].shape)
        is_simple = not node.kwargs and all(isinstance(size, int) for size in shape)
        views = list(node.users)
        if not is_simple or any(list(value.shape) != shape for value in values):
            continue
        dimension = dimension % max(1, len(shape))
        stacked = [*shape[:dimension], len(tensors), *shape[dimension:]]
        if not all(
            view.target in _VIEWS and not view.kwargs and list(view.args[1]) == stacked
            for view in views
        ):
            continue
        values = [_UNSQUEEZE(value, dimension) for value in values]
        with detect_fake_mode(values) or nullcontext():
            value = node.target(values, dimension)
        # With a new dimension of size 1, transposed tensors can have the strides of channels_last;
        # `cat` then returns that memory format, in which later views of the stack would fail.
        if any(value.stride() != view.meta["val"].stride() for view in views):
            continue
        with graph.inserting_before(node):
            parts = [graph.call_function(_UNSQUEEZE, (tensor, dimension)) for tensor in tensors]
            stack = graph.call_function(node.target, (parts, dimension))
        for part, part_value in zip(parts, values, strict=True):
            part.meta = {**node.meta, "val": part_value}
        stack.meta = {**node.meta, "val": value}
        for view in views:
            view.replace_all_uses_with(stack)
            graph.erase_node(view)
        graph.erase_node(node)


class CannotSplit(RematError):
    """The largest operations of a graph cannot be split."""


def _joint_graph_to_trace(module: fx.GraphModule, num_fwd_outputs: int) -> Trace:
    """Return the trace that describes a joint graph. Raises `RematError` for symbolic sizes."""
    builder = TraceBuilder(allows_opaque=True)
    backward = _backward_nodes(module.graph)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            if node.op == "get_attr" and value is None:
                value = getattr(module, str(node.target))
            if not isinstance(value, torch.Tensor):
                raise RematError(
                    f"{node.name} is no tensor: graphs with symbolic sizes are not split"
                )
            kind = "tangent" if is_tangent(node) else "input"
            builder.read_input(node, value, kind=kind, target=str(len(builder.placeholders)))
        elif node.op == "call_function" and not is_getitem(node):
            record = builder.read_call(
                node,
                returns=not mutated_args(node),
                backward=node in backward,
                module=module_path(node),
            )
            builder.nodes.append(record)
    (returned,) = module.graph.output_node().args
    assert isinstance(returned, (tuple, list))
    return builder.step(
        _tensor_nodes(returned[:num_fwd_outputs]), _tensor_nodes(returned[num_fwd_outputs:])
    )


class _SplitGraphWriter(GraphWriter):
    """The fx graph of a split trace: copies of the joint graph's nodes that stayed, and new nodes
    for pieces, with the `meta` of the node that was split."""

    def __init__(self, module: fx.GraphModule, trace: Trace) -> None:
        super().__init__(fx.Graph())
        self.trace = trace
        self.old = module.graph
        self.templates = {identifier(node.name): node for node in module.graph.nodes}
        self.meta: dict[str, Any] = {}
        """The `meta` of the nodes of the current record."""
        self.rows: dict[str, list[Ref]] = {}
        """The pieces that were written into a buffer so far, by the buffer's name."""
        writers = [node for node in trace.nodes if node.target == WRITE_ROWS_TARGET]
        self.unfinished_buffers = {n.args[0].name for n in writers if isinstance(n.args[0], Ref)}
        inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        self.fake_mode = detect_fake_mode(inputs)

    def write(self) -> fx.Graph:
        """Write the whole graph, and return it."""
        for node in self.old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy_unsplit_node(node)
        for record in self.trace.nodes:
            template = self.templates.get(record.name)
            if template is None or record.piece_of:
                self._add_split_record(record)
            else:
                for node in (template, *filter(is_getitem, template.users)):
                    self._copy_unsplit_node(node)
        old_output = self.old.output_node()
        (returned,) = old_output.args
        output = self.graph.output(fx.map_arg(returned, self._copied_node))
        output.meta.update(old_output.meta)
        self.graph.lint()
        return self.graph

    def call(
        self,
        function: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Append a call, with its result on fake tensors and the `meta` of the current record, and
        return its node."""
        node = super().call(function, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.fake_mode:  # type: ignore[union-attr]
            node.meta = {**self.meta, "val": function(*fake_args, **fake_kwargs)}
        return node

    def _copy_unsplit_node(self, node: fx.Node) -> None:
        """Copy a node of the joint graph that stays whole."""
        copied = self.graph.node_copy(node, self._copied_node)
        copied.meta = dict(node.meta)
        self.nodes[identifier(node.name)] = copied

    def _copied_node(self, node: fx.Node) -> fx.Node:
        """Return the node of the new graph for a node of the joint graph."""
        return self.nodes[identifier(node.name)]

    def _add_split_record(self, record: Node) -> None:
        """Add the nodes of a record of the split trace: an operation's call for a piece, or one
        that adds or joins pieces."""
        source = self.templates.get((record.piece_of or record.name).split(MOVED_SUFFIX)[0])
        meta = {} if source is None else source.meta
        self.meta = {key: meta[key] for key in _COPIED_META if key in meta}
        if record.piece_of:
            self.meta[PIECE_KEY] = (record.piece_of, record.piece)
        if record.target == WRITE_ROWS_TARGET:
            self._join_written_rows(record)
        else:
            function = resolve_operator(_FUNCTIONAL_TARGETS.get(record.target, record.target))
            self.bind(self.call(function, *self.arguments(record)), record.results)

    def _join_written_rows(self, record: Node) -> None:
        """Remember the piece that a record writes into a buffer; after the last piece, concatenate
        all of them."""
        (result,) = record.results
        before, piece, shape, _, first, count, _ = record.args
        assert isinstance(piece, Ref)
        rows = [*self.rows.pop(before.name), piece] if isinstance(before, Ref) else [piece]
        self.rows[result.name] = rows
        if result.name in self.unfinished_buffers:
            return
        assert isinstance(first, int)
        assert isinstance(count, int)
        parts = [self.nodes[row.name] for row in rows]
        joined = self.call(torch.ops.aten.cat.default, (parts, first + count - 1))
        if count > 1:
            assert isinstance(shape, tuple)
            joined = self.call(torch.ops.aten.view.default, (joined, list(shape)))
        self.nodes[result.name] = joined


def _tensor_nodes(values: Any) -> list[fx.Node]:
    """Return the fx nodes among values whose results are tensors."""
    return [
        value
        for value in values
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
    ]


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the backward: those that depend on a tangent."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_first = node.op == "placeholder" and is_tangent(node)
        if is_first or any(n in backward for n in node.all_input_nodes):
            backward.add(node)
    return backward
