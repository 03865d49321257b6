"""Splitting the largest operations of AOTAutograd's joint graph: as a trace, and back.

The graph is described by a `Trace`, on which `passes.split` works, and the new operations become
fx nodes. Sums are added by functional operations, and rows are joined by one concatenation:
Inductor decides which of them write in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from remat.documents.arguments import Argument, Ref, referenced_names
from remat.documents.records import Node
from remat.documents.targets import ADD_PRODUCT_TARGET, ADD_TARGET, WRITE_ROWS_TARGET
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.capture.reading.trace_builder import TraceBuilder, identifier
from remat.frontend.common.aliases import is_getitem, mutated_args
from remat.frontend.common.operators import (
    argument_to_torch,
    resolve,
)
from remat.frontend.compile.compat import is_tangent
from remat.frontend.compile.fx_utils import PIECE_KEY, module_path
from remat.graph import Split
from remat.passes.split.moved_slices import MOVED_SUFFIX
from remat.passes.split.obstacle import split_obstacle
from remat.passes.split.splits import split_largest_operations

_COPIED_META = (
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "original_aten",
    "from_node", "seq_nr", "partitioner_tag", "custom",
)  # fmt: skip
"""Items of `meta` that the nodes of pieces copy from the node that was split."""


def split_joint_graph(
    module: fx.GraphModule, num_fwd_outputs: int, pieces: int
) -> tuple[fx.GraphModule, tuple[Split, ...], str]:
    """Return the joint graph with its largest operations in `pieces` pieces, what was split, and
    why the logits are not, "" if that is not known.

    Raises `CannotSplit` if they have no rule, or the graph has symbolic sizes.
    """
    try:
        trace = _read_joint_graph(module, num_fwd_outputs)
        split = split_largest_operations(trace, pieces)
    except (RematError, ValueError) as error:  # a ValueError: it cannot be described by a trace
        raise CannotSplit(str(error)) from error
    if split is trace:
        raise CannotSplit(split_obstacle(trace) or "there is no rule for one of them")
    graph = _GraphOfPieces(module, split).graph()
    splits = tuple(record.to_split() for record in split.splits)
    return fx.GraphModule(module, graph), splits, split_obstacle(trace)


class CannotSplit(RematError):
    """The largest operations of a graph cannot be split."""


def _read_joint_graph(module: fx.GraphModule, num_fwd_outputs: int) -> Trace:
    """Return a joint graph as a trace. Raises `RematError` for symbolic sizes."""
    builder = TraceBuilder(allows_opaque=True)
    backward = _depending_on_tangents(module.graph)
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
    return builder.step(_tensors(returned[:num_fwd_outputs]), _tensors(returned[num_fwd_outputs:]))


class _GraphOfPieces:
    """The fx graph of a split trace: copies of nodes that stayed, and new nodes for pieces."""

    def __init__(self, module: fx.GraphModule, trace: Trace) -> None:
        self.trace = trace
        self.old = module.graph
        self.old_nodes: dict[str, fx.Node] = {identifier(n.name): n for n in module.graph.nodes}
        self.new_graph = fx.Graph()
        self.tensors: dict[str, fx.Node] = {}
        self.rows: dict[str, list[Ref]] = {}
        """The pieces that were written into a buffer so far, by the buffer's name."""
        writers = [node for node in trace.nodes if node.target == WRITE_ROWS_TARGET]
        self.unfinished_buffers = {n.args[0].name for n in writers if isinstance(n.args[0], Ref)}
        inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        self.fake_mode = detect_fake_mode(inputs)

    def graph(self) -> fx.Graph:
        """Return the graph."""
        for node in self.old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.tensors[identifier(node.name)] = self._copy(node)
        for record in self.trace.nodes:
            if not record.piece_of and record.name in self.old_nodes:
                self._copy_with_items(self.old_nodes[record.name])
            else:
                self._add(record)
        old_output = self.old.output_node()
        (returned,) = old_output.args
        output = self.new_graph.output(
            fx.map_arg(returned, lambda n: self.tensors[identifier(n.name)])
        )
        output.meta.update(old_output.meta)
        self.new_graph.lint()
        return self.new_graph

    def _copy(self, node: fx.Node) -> fx.Node:
        copied = self.new_graph.node_copy(node, self._copy_of)
        copied.meta = dict(node.meta)
        return copied

    def _copy_of(self, node: fx.Node) -> fx.Node:
        return self.tensors[identifier(node.name)]

    def _copy_with_items(self, node: fx.Node) -> None:
        self.tensors[identifier(node.name)] = self._copy(node)
        for user in node.users:
            if is_getitem(user):
                self.tensors[identifier(user.name)] = self._copy(user)

    def _add(self, record: Node) -> None:
        """Add the node of a piece, or of a sum of pieces."""
        if record.target == WRITE_ROWS_TARGET:
            self._write_rows(record)
            return
        target, args = record.target, record.args
        if target == ADD_TARGET:
            target = "aten.add.Tensor"
        elif target == ADD_PRODUCT_TARGET:
            target = "aten.addmm.default"
        node = self._call(record, target, args, record.kwargs)
        for result in record.results:
            is_item = result.position >= 0
            self.tensors[result.name] = self._item(node, result.position) if is_item else node

    def _write_rows(self, record: Node) -> None:
        """Remember a piece of a buffer; after the last, join all of them."""
        (result,) = record.results
        before, piece, shape, _, first, count, _ = record.args
        assert isinstance(piece, Ref)
        rows = [*self.rows.pop(before.name), piece] if isinstance(before, Ref) else [piece]
        self.rows[result.name] = rows
        if result.name in self.unfinished_buffers:
            return
        assert isinstance(first, int)
        assert isinstance(count, int)
        joined = self._call(record, "aten.cat.default", (tuple(rows), first + count - 1), {})
        if count > 1:
            joined = self._node(record, torch.ops.aten.view.default, (joined, list(shape)), {})  # type: ignore[arg-type]
        self.tensors[result.name] = joined

    def _call(
        self, record: Node, target: str, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]
    ) -> fx.Node:
        nodes: dict[str, Any] = {
            name: self.tensors[name] for name in referenced_names((args, *kwargs.values()))
        }
        return self._node(
            record,
            resolve(target),
            tuple(argument_to_torch(item, nodes) for item in args),
            {key: argument_to_torch(item, nodes) for key, item in kwargs.items()},
        )

    def _node(
        self, record: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        node = self.new_graph.call_function(target, args, kwargs)
        source = self.old_nodes.get((record.piece_of or record.name).split(MOVED_SUFFIX)[0])
        if source is not None:
            node.meta = {key: source.meta[key] for key in _COPIED_META if key in source.meta}
        if record.piece_of:
            node.meta[PIECE_KEY] = (record.piece_of, record.piece)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:  # type: ignore[union-attr]
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def _item(self, node: fx.Node, position: int) -> fx.Node:
        item = self.new_graph.call_function(operator.getitem, (node, position))
        item.meta = {**node.meta, "val": node.meta["val"][position]}
        return item


def _tensors(values: Any) -> list[fx.Node]:
    """Return the nodes among values that are tensors."""
    return [
        value
        for value in values
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
    ]


def _depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the backward: those that depend on a tangent."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_first = node.op == "placeholder" and is_tangent(node)
        if is_first or any(n in backward for n in node.all_input_nodes):
            backward.add(node)
    return backward
