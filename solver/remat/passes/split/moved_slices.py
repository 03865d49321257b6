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
from dataclasses import dataclass
from math import prod
from typing import Any

from remat.documents.arguments import Args, Literal, Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.documents.trace import Trace
from remat.passes.split.regions import TraceIndex
from remat.passes.trace_writer import TraceWriter, unmeasured

MOVED_SUFFIX = "_of_slice"
"""The end of the names of operations that work on a slice of their former input."""

PRODUCTS = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""The position of the argument whose rows are the result's."""

VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
TRANSPOSES = ("aten.t.default", "aten.permute.default", "aten.transpose.int")
CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_MIN_SHARE = 0.25
"""The smallest result whose slice counts, as a share of the largest tensor of the step."""


def with_moved_slices(trace: Trace) -> Trace:
    """Return the trace with slices of large results of linear layers moved to their inputs; the
    same trace if there are none. Operations that changed have no costs."""
    if trace.splits:  # it was made of a trace without such slices
        return trace
    moved = trace
    while (first := first_layer_slice(moved)) is not None:
        moved = _Rewriting(moved, first).trace()
    return moved


@dataclass(frozen=True)
class LayerSlice:
    """A slice of a linear layer's result: `[..., start:end, ...]` in `dimension` of the `shape`.

    Other fields are indices of nodes. `forward` goes from the slice up to the product, `copy` is
    the copy of the slice into a tensor of its own, None if the slice is contiguous. `backward` goes
    from the padding of the slice's gradient down to the gradient of the product, and `gradients`
    are the readers of that: transposes, products and sums over the rows.
    """

    shape: tuple[int, ...]
    dimension: int
    start: int
    end: int
    forward: tuple[int, ...]
    copy: int | None
    backward: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows of the layer."""
        return prod(self.shape[:-1])

    @property
    def slice_rows(self) -> int:
        """The number of rows of the slice."""
        return self.rows // self.shape[self.dimension] * (self.end - self.start)

    def sliced(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of a tensor with the slice's rows only; None if it has no such rows."""
        leading = len(self.shape) - 1
        if tuple(shape[:leading]) == self.shape[:-1]:
            size = self.end - self.start
            return (*shape[: self.dimension], size, *shape[self.dimension + 1 :])
        return (self.slice_rows, *shape[1:]) if shape and shape[0] == self.rows else None


def first_layer_slice(trace: Trace) -> LayerSlice | None:
    """Return the first slice that can be moved; None without any."""
    nodes = trace.nodes
    slices = [n for n, node in enumerate(nodes) if node.target == "aten.slice.Tensor"]
    if not slices:
        return None
    finder = _Finder(trace)
    return next((item for n in slices if (item := finder.find(n)) is not None), None)


class _Finder:
    """Finds slices of linear layers' results in a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.index = trace, TraceIndex(trace)
        self.returned = {o.name for o in trace.outputs} | {g.name for g in trace.gradients}
        produced = {r.storage for node in trace.nodes for r in node.results}
        self.least_bytes = _MIN_SHARE * max((trace.storage_bytes[s] for s in produced), default=0)

    def find(self, number: int) -> LayerSlice | None:
        """Return the slice that a node makes of a linear layer's result; None if it makes none, or
        if it cannot be moved."""
        trace, node = self.trace, self.trace.nodes[number]
        source = node.operand_names[0]
        shape = trace.tensors[source].shape
        if node.backward or trace.storage_bytes[trace.storage_of[source]] < self.least_bytes:
            return None
        part = _sliced_range(node, 1, shape)
        if part is None or part[0] >= len(shape) - 1:
            return None
        result = LayerSlice(shape, *part, (number,), None, (), ())
        forward = self._chain_to_product(result, source, number)
        copy = self._copy_of(node)
        if not forward or (copy is None and not node.results[0].tensor.is_row_major()):
            return None
        result = LayerSlice(shape, *part, (number, *forward), copy, (), ())
        gradients = (
            self._gradient_of(result, n) for n, other in enumerate(trace.nodes) if other.backward
        )
        return next((item for item in gradients if item is not None), None)

    def _chain_to_product(self, part: LayerSlice, name: str, reader: int) -> tuple[int, ...]:
        """Return the nodes from the one that produces the slice's source up to the product; none if
        there are others, or others read their results."""
        trace, chain = self.trace, list[int]()
        while self._is_read_by(name, [reader]) and name in self.index.producer:
            reader = self.index.producer[name]
            node, tensor = trace.nodes[reader], trace.tensors[name]
            chain.append(reader)
            if not tensor.is_row_major() or part.sliced(tensor.shape) is None:
                break
            if node.target in PRODUCTS:
                rows, addend = node.args[PRODUCTS[node.target]], node.args[0]
                assert isinstance(rows, Ref)
                if addend != rows:  # one for each column, not for each row of the product
                    assert isinstance(addend, Ref)
                    if len(trace.tensors[addend.name].shape) != 1:
                        break
                return tuple(chain) if trace.tensors[rows.name].is_row_major() else ()
            if node.target not in (*VIEWS, *CASTS):
                break
            name = node.operand_names[0]
        return ()

    def _copy_of(self, node: Node) -> int | None:
        """Return the node that copies a slice, its only reader, into a contiguous tensor."""
        readers = self.index.consumers.get(node.results[0].name, [])
        if len(readers) != 1 or not self._is_read_by(node.results[0].name, readers):
            return None
        copy = self.trace.nodes[readers[0]]
        is_copy = copy.target == "aten.clone.default" and copy.results[0].tensor.is_row_major()
        return readers[0] if is_copy and copy.results[0].name not in self.returned else None

    def _gradient_of(self, part: LayerSlice, number: int) -> LayerSlice | None:
        """Return the slice with the nodes of its gradient, which begin with this one; None if they
        do not."""
        trace, node = self.trace, self.trace.nodes[number]
        name = padded_gradient(trace, self.index, node, part)
        if not name or not trace.tensors[name].is_row_major():
            return None
        chain, current = [number], node.results[0].name
        while True:
            readers = self.index.consumers.get(current, [])
            if not readers or not self._is_read_by(current, readers):
                return None
            reader = trace.nodes[readers[0]]
            if len(readers) > 1 or reader.target not in (*VIEWS, *CASTS):
                break
            current = reader.results[0].name
            tensor = trace.tensors[current]
            if part.sliced(tensor.shape) is None or not tensor.is_row_major():
                return None
            chain.append(readers[0])
        product = trace.nodes[part.forward[-1]]
        rows = product.args[PRODUCTS[product.target]]
        gradients = self._readers_of_gradient(current, rows)
        if len(trace.tensors[current].shape) != 2 or not gradients:
            return None
        return LayerSlice(
            part.shape, part.dimension, part.start, part.end, part.forward, part.copy,
            tuple(chain), gradients,
        )  # fmt: skip

    def _readers_of_gradient(self, gradient: str, rows: object) -> tuple[int, ...]:
        """Return the nodes that read the gradient of the product, with those that read its
        transposes; none if one of them needs rows whose gradient is zero."""
        nodes, readers = self.trace.nodes, list[int]()
        for number in self.index.consumers[gradient]:
            node, operand = nodes[number], Ref(gradient)
            readers.append(number)
            if node.target in TRANSPOSES:
                transposed = node.results[0].name
                products = self.index.consumers.get(transposed, [])
                operands = (Ref(transposed), rows)
                if not self._is_read_by(transposed, products) or any(
                    nodes[n].target != "aten.mm.default" or nodes[n].args != operands
                    for n in products
                ):
                    return ()
                readers += products
            elif node.target == "aten.mm.default":
                if node.args[0] != operand or node.args[1] == operand:
                    return ()
                if not node.results[0].tensor.is_row_major():
                    return ()
            elif node.target != "aten.sum.dim_IntList" or node.args[1] != (0,):
                return ()
        return tuple(readers)

    def _is_read_by(self, name: str, readers: Sequence[int]) -> bool:
        """True if only these nodes read a tensor, which nothing writes to, and no caller gets."""
        is_mutated = self.trace.storage_of[name] in self.index.mutated
        is_returned = name in self.returned
        return not is_mutated and not is_returned and self.index.consumers.get(name) == [*readers]


def _sliced_range(node: Node, first: int, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return dimension, start and end of a slice of a tensor of this shape, from the arguments of
    a node from `first` on; None for a step, or if the slice is all of it or nothing."""
    defaults: list[Any] = [0, None, None, 1]
    values = [*node.args[first : first + 4], *defaults[len(node.args[first : first + 4]) :]]
    dimension, start, end, step = values
    dimension %= max(len(shape), 1)
    size = shape[dimension] if shape else 0
    start, end, _ = slice(start, end).indices(size)
    is_part = start < end and end - start < size
    return (dimension, start, end) if step == 1 and is_part else None


def padded_gradient(trace: Trace, index: TraceIndex, node: Node, part: LayerSlice) -> str:
    """Return the name of the slice's gradient if a node pads it with zeros to the gradient of the
    slice's source; "" for any other node."""
    wanted = part.dimension, part.start, part.end
    if node.target == "aten.slice_backward.default":
        gradient, shape = node.args[:2]
        if shape == part.shape and _sliced_range(node, 2, part.shape) == wanted:
            return gradient.name if isinstance(gradient, Ref) else ""
    elif node.target == "aten.slice_scatter.default":
        zeros, gradient = node.args[:2]
        if isinstance(zeros, Ref) and isinstance(gradient, Ref) and zeros.name in index.producer:
            full = trace.nodes[index.producer[zeros.name]]
            is_zero = full.target == "aten.full.default" and full.args[1] in (0, 0.0)
            has_shape = trace.tensors[zeros.name].shape == part.shape
            if is_zero and has_shape and _sliced_range(node, 2, part.shape) == wanted:
                return gradient.name
    return ""


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
        is_changed = not self.names.keys().isdisjoint(node.operand_names)
        return node.with_operands(self.names) if is_changed else node

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
        """Write the views and casts between the slice's gradient and the product's gradient."""
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
        """Return the bytes of the slice's rows, from the bytes of all rows."""
        return size_bytes * self.part.slice_rows // self.part.rows


def _row_major(tensor: TensorMeta, shape: Sequence[int]) -> TensorMeta:
    """Return the metadata of a contiguous tensor of this shape."""
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return tensor.model_copy(update={"shape": tuple(shape), "stride": stride, "offset": 0})
