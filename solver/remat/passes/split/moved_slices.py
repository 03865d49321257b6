"""Slices of rows, moved from the result of a linear layer to its input.

Training loops shift logits: `logits[:, :-1]` predicts the labels of `ids[:, 1:]`. The slice leaves
out rows in the middle of a batch's tokens, so that pieces of the logits and of the sliced logits
are not the same rows, and the layer could not be split together with the loss. But a row of the
layer's result depends on that row of its input only: the layer of the sliced input is the sliced
result, and in the backward the rows that were left out have a gradient of zero. So the slice moves
to the much smaller input, and the gradient of that is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from remat.documents.arguments import Args, Literal, Ref, rename_refs
from remat.documents.records import Node, Result, TensorMeta
from remat.documents.trace import Trace
from remat.passes.split.layer_slices import (
    PRODUCTS,
    TRANSPOSES,
    VIEWS,
    LayerSlice,
    first_layer_slice,
    padded_gradient,
)
from remat.passes.split.regions import TraceIndex
from remat.passes.trace_writer import TraceWriter, unmeasured

MOVED_SUFFIX = "_of_slice"
"""The end of the names of operations that work on a slice of their former input."""


def with_moved_slices(trace: Trace) -> Trace:
    """Return the trace with slices of large results of linear layers moved to their inputs; the
    same trace if there are none. Operations that changed have no costs."""
    if trace.splits:  # it was made of a trace without such slices
        return trace
    moved = trace
    while (first := first_layer_slice(moved)) is not None:
        moved = _Rewriting(moved, first).trace()
    return moved


class _Rewriting:
    """The trace with one slice moved to the input of its layer."""

    def __init__(self, trace: Trace, part: LayerSlice) -> None:
        self.old, self.part = trace, part
        self.removed = {*part.forward, *part.backward, *part.gradients}
        if part.copy is not None:
            self.removed.add(part.copy)
        self.writer = TraceWriter(trace)
        self.names: dict[str, str] = {}
        """The new names of tensors of which only the slice's rows are left."""
        self.sliced_rows = ""
        """The name of the layer's input with the slice's rows."""
        self.gradient = trace.nodes[part.backward[-1]].results[0].name
        """The name of the product's gradient in the old trace."""

    def trace(self) -> Trace:
        """Return the new trace."""
        part, nodes = self.part, self.old.nodes
        zeros = self._unread_zeros()
        for number, node in enumerate(nodes):
            if number == part.forward[-1]:
                self._write_layer()
            elif number == part.backward[-1]:
                self._write_gradient()
            if number in part.gradients:
                self._write_reader(node)
            elif number not in self.removed and number != zeros:
                self.writer.add(self._renamed(node))
        return self.writer.trace()

    def _renamed(self, node: Node) -> Node:
        if self.names.keys().isdisjoint(node.operand_names):
            return node

        def name_of(name: str) -> str:
            return self.names.get(name, name)

        args: Any = rename_refs(node.args, name_of)
        kwargs = {key: rename_refs(value, name_of) for key, value in node.kwargs.items()}
        return node.model_copy(update={"args": args, "kwargs": kwargs})

    def _unread_zeros(self) -> int | None:
        """Return the node of the zeros that the gradient is written into, if nothing else reads
        them."""
        padding = self.old.nodes[self.part.backward[0]]
        if padding.target != "aten.slice_scatter.default":
            return None
        index = TraceIndex(self.old)
        zeros = padding.operand_names[0]
        is_read = len(index.consumers[zeros]) > 1
        return None if is_read else index.producer[zeros]

    def _write_layer(self) -> None:
        """Write the slice of the layer's input, and the layer of that."""
        part, old, writer = self.part, self.old, self.writer
        *chain, number = part.forward[1:]
        product = old.nodes[number]
        position = PRODUCTS[product.target]
        rows = product.args[position]
        assert isinstance(rows, Ref)
        self.sliced_rows = self._write_slice(product, rows.name)
        source = old.nodes[part.forward[0]].operand_names[0]
        if part.copy is None:
            last_storage = old.storage_of[source]
            writer.storage_bytes[last_storage] = self._scaled(writer.storage_bytes[last_storage])
        else:
            last_storage = old.nodes[part.copy].results[0].storage
        storages = {old.storage_of[source]: last_storage}
        args = (*product.args[:position], Ref(self.sliced_rows), *product.args[position + 1 :])
        name = self._write_rows(product, args, storages)
        for number in reversed(chain):
            node = old.nodes[number]
            name = self._write_rows(node, self._with_operand(node, name), storages)
        self.names[old.nodes[part.forward[0]].results[0].name] = name
        if part.copy is not None:
            self.names[old.nodes[part.copy].results[0].name] = name

    def _write_slice(self, product: Node, rows: str) -> str:
        """Write the slice of the layer's input as a tensor of its own, and return its name."""
        part, meta = self.part, self.old.tensors[rows]
        width = meta.shape[1]
        shape = (*part.shape[:-1], width)
        sliced = (*shape[: part.dimension], part.end - part.start, *shape[part.dimension + 1 :])
        storage = self.old.storage_of[rows]
        whole = self._write(
            product, "aten.view.default", (Ref(rows), shape), _row_major(meta, shape), storage
        )
        tensor = _row_major(meta, shape)
        tensor = tensor.model_copy(
            update={"shape": sliced, "offset": part.start * tensor.stride[part.dimension]}
        )
        arguments = (Ref(whole), part.dimension, part.start, part.end)
        view = self._write(product, "aten.slice.Tensor", arguments, tensor, storage)
        copied = self.writer.new_storage(self._scaled(prod(meta.shape) * self._item_bytes(rows)))
        contiguous = {"memory_format": Literal("memory_format", "contiguous_format")}
        copy = self._write(
            product,
            "aten.clone.default",
            (Ref(view),),
            _row_major(meta, sliced),
            copied,
            contiguous,
        )
        flat = (part.slice_rows, width)
        meta = _row_major(meta, flat)
        return self._write(product, "aten.view.default", (Ref(copy), flat), meta, copied)

    def _item_bytes(self, name: str) -> int:
        """Return the bytes of an element of a tensor that fills its storage."""
        old = self.old
        elements = max(1, prod(old.tensors[name].shape))
        return max(1, old.storage_bytes[old.storage_of[name]] // elements)

    def _write_gradient(self) -> None:
        """Write what remains between the slice's gradient and that of the product."""
        part, old = self.part, self.old
        padding = old.nodes[part.backward[0]]
        name = padded_gradient(old, TraceIndex(old), padding, part)
        storages = {old.storage_of[padding.results[0].name]: old.storage_of[name]}
        current = padding.results[0].name
        for number in part.backward[1:]:
            node = old.nodes[number]
            name = self._write_rows(node, self._with_operand(node, name), storages)
            current = node.results[0].name
        self.names[current] = name

    def _write_reader(self, node: Node) -> None:
        """Write a node that reads the gradient of the product, or a transpose of it."""
        operand = node.operand_names[0]
        (result,) = node.results
        gradient = self.names[operand]
        if node.target in TRANSPOSES:
            words, _ = result.tensor.shape
            shape = (words, self.part.slice_rows)
            tensor = result.tensor.model_copy(update={"shape": shape, "stride": (1, words)})
            storage = self.writer.storage_of(gradient)
            args = self._with_operand(node, gradient)
            self.names[result.name] = self._write(node, node.target, args, tensor, storage)
        elif node.target == "aten.mm.default" and operand == self.gradient:
            self._write_padded(node, gradient)
        else:
            args = self._with_operand(node, gradient)
            if node.target == "aten.mm.default":
                args = (args[0], Ref(self.sliced_rows))
            name = self.writer.new_name(f"{node.name}{MOVED_SUFFIX}")
            self.writer.add(unmeasured(node, name=name, args=args))

    def _write_padded(self, node: Node, gradient: str) -> None:
        """Write the gradient of the layer's input: zero in the rows that the slice leaves out."""
        part = self.part
        (result,) = node.results
        rows, width = result.tensor.shape
        storage = self.writer.new_storage(
            self._scaled(rows * width * self._item_bytes(result.name))
        )
        meta = _row_major(result.tensor, (part.slice_rows, width))
        name = self._write(node, node.target, self._with_operand(node, gradient), meta, storage)
        shape = (*part.shape[:-1], width)
        sliced = (*shape[: part.dimension], part.end - part.start, *shape[part.dimension + 1 :])
        meta = _row_major(meta, sliced)
        name = self._write(node, "aten.view.default", (Ref(name), sliced), meta, storage)
        after = part.shape[part.dimension] - part.end
        pads = (*(0, 0) * (len(shape) - 1 - part.dimension), part.start, after)
        meta = _row_major(meta, shape)
        args = (Ref(name), pads, 0.0)
        name = self._write(node, "aten.constant_pad_nd.default", args, meta, result.storage)
        self.writer.add(
            unmeasured(
                node, name=self.writer.new_name(f"{result.name}{MOVED_SUFFIX}"), view=True,
                target="aten.view.default", args=(Ref(name), result.tensor.shape),
            )
        )  # fmt: skip

    def _write_rows(self, node: Node, args: Args, storages: dict[int, int]) -> str:
        """Write a node of the layer or of its gradient with the slice's rows, and return the name
        of its result. `storages` has the new storage of each old one."""
        (result,) = node.results
        shape = self.part.sliced(result.tensor.shape)
        assert shape is not None
        if result.storage not in storages:
            size_bytes = self.old.storage_bytes[result.storage]
            storages[result.storage] = self.writer.new_storage(self._scaled(size_bytes))
        if node.target in VIEWS:
            args = (args[0], shape)
        meta = _row_major(result.tensor, shape)
        return self._write(node, node.target, args, meta, storages[result.storage], node.kwargs)

    def _write(
        self,
        like: Node,
        target: str,
        args: Args,
        tensor: TensorMeta,
        storage: int,
        kwargs: Any = None,
    ) -> str:
        """Write a node with one result, and return its name."""
        is_view = target in (*VIEWS, *TRANSPOSES, "aten.slice.Tensor")
        name = self.writer.new_name(f"{like.name}{MOVED_SUFFIX}")
        result = Result(name=name, tensor=tensor, storage=storage)
        self.writer.add(
            unmeasured(
                like, name=name, target=target, args=args, kwargs=kwargs or {}, view=is_view,
                results=(result,),
            )
        )  # fmt: skip
        return name

    @staticmethod
    def _with_operand(node: Node, name: str) -> Args:
        """Return the arguments of a node with another first one."""
        return (Ref(name), *node.args[1:])

    def _scaled(self, size_bytes: int) -> int:
        """Return the part of the bytes of all rows that those of the slice have."""
        return size_bytes * self.part.slice_rows // self.part.rows


def _row_major(tensor: TensorMeta, shape: Sequence[int]) -> TensorMeta:
    """Return the metadata of a contiguous tensor of this shape."""
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return tensor.model_copy(update={"shape": tuple(shape), "stride": stride, "offset": 0})
