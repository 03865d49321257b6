"""Slices of rows, moved from the result of a linear layer to its input.

Training loops shift logits: `logits[:, :-1]` predicts the labels of `ids[:, 1:]`. The slice leaves
out rows in the middle of a batch's tokens, so that pieces of the logits and of the sliced logits
are not the same rows, and the layer could not be split together with the loss. But a row of the
layer's result depends on that row of its input only: the layer of the sliced input is the sliced
result, and in the backward the rows that were left out have a gradient of zero. So the slice moves
to the much smaller input, and the gradient of that is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from remat.documents.arguments import Args, Kwargs, Literal, Ref
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
    """Return the trace with slices of large results of linear layers moved to the inputs of these
    layers; the same trace if there are none, or if it has splits. Operations that changed have no
    costs."""
    if trace.splits:  # it was made of a trace without such slices
        return trace
    moved = trace
    while (first := first_layer_slice(moved)) is not None:
        moved = _SliceRewriting(moved, first).trace()
    return moved


@dataclass(frozen=True)
class LayerSlice:
    """A slice of a linear layer's result: `[..., start:end, ...]` in `dimension` of the `shape`.

    Other fields are indices of nodes. `forward` goes from the slice up to the product, `copy` is
    the copy of the slice into a tensor of its own, None if the slice is contiguous. `backward` goes
    from the padding of the slice's gradient, which is the tensor `gradient`, down to the gradient
    of the product, and `gradients` are the readers of that: transposes, products and sums over the
    rows. `zeros` are what the gradient is padded with, if nothing else reads them.
    """

    shape: tuple[int, ...]
    dimension: int
    start: int
    end: int
    forward: tuple[int, ...] = ()
    copy: int | None = None
    gradient: str = ""
    backward: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    zeros: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows of the layer."""
        return prod(self.shape[:-1])

    @property
    def slice_rows(self) -> int:
        """The number of rows of the slice."""
        return self.rows // self.shape[self.dimension] * (self.end - self.start)

    def sliced_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape that a tensor of this shape has with the slice's rows only. Its rows are
        the leading dimensions, or the first dimension; None if it has other rows."""
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
    finder = _LayerSliceFinder(trace)
    return next((item for n in slices if (item := finder.find(n)) is not None), None)


class _LayerSliceFinder:
    """Finds slices of linear layers' results in a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.index = trace, TraceIndex(trace)
        self.returned = {o.name for o in trace.outputs} | {g.name for g in trace.gradients}
        produced = {r.storage for node in trace.nodes for r in node.results}
        self.least_bytes = _MIN_SHARE * max((trace.storage_bytes[s] for s in produced), default=0)

    def find(self, number: int) -> LayerSlice | None:
        """Return the slice of a linear layer's result that the node with this index makes; None if
        it makes none, or if it cannot be moved."""
        trace, node = self.trace, self.trace.nodes[number]
        source = node.operand_names[0]
        shape = trace.tensors[source].shape
        if node.backward or trace.storage_bytes[trace.storage_of[source]] < self.least_bytes:
            return None
        sliced_range = _sliced_range(node, 1, shape)
        if sliced_range is None or sliced_range[0] >= len(shape) - 1:
            return None
        part = LayerSlice(shape, *sliced_range)
        forward = self._chain_to_product(part, source, number)
        copy = self._contiguous_copy_of(node)
        if not forward or (copy is None and not node.results[0].tensor.is_row_major()):
            return None
        result = replace(part, forward=(number, *forward), copy=copy)
        gradients = (
            self._with_gradient_from(result, n)
            for n, other in enumerate(trace.nodes)
            if other.backward
        )
        return next((item for item in gradients if item is not None), None)

    def _chain_to_product(self, part: LayerSlice, name: str, reader: int) -> tuple[int, ...]:
        """Return the nodes from the producer of the slice's source `name` up to the product; () if
        other operations than views and casts are between them, or if others than the next one
        (first `reader`) read their results."""
        trace, chain = self.trace, list[int]()
        while self._is_read_by(name, [reader]) and name in self.index.producer:
            reader = self.index.producer[name]
            node, tensor = trace.nodes[reader], trace.tensors[name]
            chain.append(reader)
            if not tensor.is_row_major() or part.sliced_shape(tensor.shape) is None:
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

    def _contiguous_copy_of(self, node: Node) -> int | None:
        """Return the node that copies a slice into a contiguous tensor; None unless it is the only
        reader of the slice."""
        readers = self.index.consumers.get(node.results[0].name, [])
        if len(readers) != 1 or not self._is_read_by(node.results[0].name, readers):
            return None
        copy = self.trace.nodes[readers[0]]
        is_copy = copy.target == "aten.clone.default" and copy.results[0].tensor.is_row_major()
        return readers[0] if is_copy and copy.results[0].name not in self.returned else None

    def _with_gradient_from(self, part: LayerSlice, number: int) -> LayerSlice | None:
        """Return the slice with the nodes of its gradient, the first of which has the index
        `number`; None if that node does not pad the gradient of this slice, or the slice cannot be
        moved."""
        trace, node = self.trace, self.trace.nodes[number]
        padded = self._padded_gradient(node, part)
        if padded is None or not trace.tensors[padded.gradient].is_row_major():
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
            if part.sliced_shape(tensor.shape) is None or not tensor.is_row_major():
                return None
            chain.append(readers[0])
        product = trace.nodes[part.forward[-1]]
        rows = product.args[PRODUCTS[product.target]]
        gradients = self._readers_of_gradient(current, rows)
        if len(trace.tensors[current].shape) != 2 or not gradients:
            return None
        return replace(padded, backward=tuple(chain), gradients=gradients)

    def _padded_gradient(self, node: Node, part: LayerSlice) -> LayerSlice | None:
        """Return the slice with its gradient if the node pads it with zeros to the gradient of the
        slice's source; else None."""
        if node.target not in ("aten.slice_backward.default", "aten.slice_scatter.default"):
            return None
        if _sliced_range(node, 2, part.shape) != (part.dimension, part.start, part.end):
            return None
        if node.target == "aten.slice_backward.default":
            gradient, shape = node.args[:2]
            if not isinstance(gradient, Ref) or shape != part.shape:
                return None
            return replace(part, gradient=gradient.name)
        zeros, gradient = node.args[:2]
        if not isinstance(zeros, Ref) or not isinstance(gradient, Ref):
            return None
        number = self.index.producer.get(zeros.name)
        full = None if number is None else self.trace.nodes[number]
        if full is None or full.target != "aten.full.default" or full.args[1] not in (0, 0.0):
            return None
        if self.trace.tensors[zeros.name].shape != part.shape:
            return None
        is_read = len(self.index.consumers[zeros.name]) > 1
        return replace(part, gradient=gradient.name, zeros=None if is_read else number)

    def _readers_of_gradient(self, gradient: str, rows: object) -> tuple[int, ...]:
        """Return the nodes that read the gradient of the product, or its transposes; () if one of
        them needs the rows whose gradient is zero. `rows` is the layer's input, as an argument."""
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
        """True if these are all nodes that read a tensor, nothing writes into it, and it is neither
        an output nor a gradient of the step."""
        is_mutated = self.trace.storage_of[name] in self.index.mutated
        is_returned = name in self.returned
        return not is_mutated and not is_returned and self.index.consumers.get(name) == [*readers]


def _sliced_range(node: Node, first: int, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return dimension, start and end of a slice of a tensor of this shape. They are the arguments
    of a node from index `first` on. None for a step other than 1, and for a slice of all elements
    or none."""
    defaults: list[Any] = [0, None, None, 1]
    values = [*node.args[first : first + 4], *defaults[len(node.args[first : first + 4]) :]]
    dimension, start, end, step = values
    dimension %= max(len(shape), 1)
    size = shape[dimension] if shape else 0
    start, end, _ = slice(start, end).indices(size)
    is_part = start < end and end - start < size
    return (dimension, start, end) if step == 1 and is_part else None


class _SliceRewriting:
    """Writes the trace in which one slice is moved to the input of its layer."""

    def __init__(self, trace: Trace, part: LayerSlice) -> None:
        self.old, self.part = trace, part
        self.removed = {*part.forward, *part.backward, *part.gradients, part.copy, part.zeros}
        self.writer = TraceWriter(trace)
        self.names: dict[str, str] = {}
        """The new names of tensors of which only the slice's rows are left."""
        self.product = trace.nodes[part.forward[-1]]
        rows = self.product.args[PRODUCTS[self.product.target]]
        assert isinstance(rows, Ref)
        self.rows, self.sliced_rows = rows.name, ""
        """The names of the layer's input, and of its part with the slice's rows."""
        self.gradient = trace.nodes[part.backward[-1]].results[0].name
        """The name of the product's gradient in the old trace."""

    def trace(self) -> Trace:
        """Return the new trace."""
        part = self.part
        for number, node in enumerate(self.old.nodes):
            if number == part.forward[-1]:
                self._write_layer()
            elif number == part.backward[-1]:
                self._write_gradient()
            if number in part.gradients:
                self._write_gradient_reader(node)
            elif number not in self.removed:
                is_changed = not self.names.keys().isdisjoint(node.operand_names)
                self.writer.add(node.with_operands(self.names) if is_changed else node)
        return self.writer.trace()

    def _write_layer(self) -> None:
        """Write the slice of the layer's input, and the layer applied to it."""
        part, old, writer = self.part, self.old, self.writer
        self.sliced_rows = self._write_slice()
        sliced = old.nodes[part.forward[0]]
        source = sliced.operand_names[0]
        results = [sliced.results[0]]
        if part.copy is None:
            last_storage = old.storage_of[source]
            writer.storage_bytes[last_storage] = self._slice_bytes(
                writer.storage_bytes[last_storage]
            )
        else:
            results += old.nodes[part.copy].results
            last_storage = results[-1].storage
        storages = {old.storage_of[source]: last_storage}
        name = self._write_rows(self.product, {self.rows: self.sliced_rows}, storages)
        for number in reversed(part.forward[1:-1]):
            node = old.nodes[number]
            name = self._write_rows(node, {node.operand_names[0]: name}, storages)
        self.names.update((result.name, name) for result in results)

    def _write_slice(self) -> str:
        """Write the slice of the layer's input as a tensor of its own, and return its name."""
        part, meta, like = self.part, self.old.tensors[self.rows], self.product
        storage = self.old.storage_of[self.rows]
        shape = (*part.shape[:-1], meta.shape[1])
        whole = _row_major_meta(meta, shape)
        name = self._write_node(like, "aten.view.default", (Ref(self.rows), shape), whole, storage)
        sliced = part.sliced_shape(shape)
        assert sliced is not None
        offset = part.start * whole.stride[part.dimension]
        tensor = whole.model_copy(update={"shape": sliced, "offset": offset})
        args: Args = (Ref(name), part.dimension, part.start, part.end)
        name = self._write_node(like, "aten.slice.Tensor", args, tensor, storage)
        copied = self.writer.new_storage(self._slice_bytes(self._elements_bytes(self.rows)))
        contiguous: Kwargs = {"memory_format": Literal("memory_format", "contiguous_format")}
        tensor = _row_major_meta(meta, sliced)
        name = self._write_node(
            like, "aten.clone.default", (Ref(name),), tensor, copied, contiguous
        )
        flat = (part.slice_rows, meta.shape[1])
        args = (Ref(name), flat)
        return self._write_node(
            like, "aten.view.default", args, _row_major_meta(meta, flat), copied
        )

    def _elements_bytes(self, name: str) -> int:
        """Return the bytes of the elements of a tensor that fills its storage."""
        old = self.old
        elements = prod(old.tensors[name].shape)
        item_bytes = old.storage_bytes[old.storage_of[name]] // max(1, elements)
        return elements * max(1, item_bytes)

    def _write_gradient(self) -> None:
        """Write the views and casts between the slice's gradient and the product's gradient."""
        part, old = self.part, self.old
        name, current = part.gradient, old.nodes[part.backward[0]].results[0].name
        storages = {old.storage_of[current]: old.storage_of[name]}
        for number in part.backward[1:]:
            node = old.nodes[number]
            name = self._write_rows(node, {current: name}, storages)
            current = node.results[0].name
        self.names[current] = name

    def _write_gradient_reader(self, node: Node) -> None:
        """Write a node that reads the gradient of the product, or a transpose of it."""
        operand = node.operand_names[0]
        (result,) = node.results
        changed = node.with_operands({operand: self.names[operand], self.rows: self.sliced_rows})
        if node.target in TRANSPOSES:
            words, _ = result.tensor.shape
            shape = (words, self.part.slice_rows)
            tensor = result.tensor.model_copy(update={"shape": shape, "stride": (1, words)})
            storage = self.writer.storage_of(self.names[operand])
            name = self._write_node(node, node.target, changed.args, tensor, storage)
            self.names[result.name] = name
        elif node.target == "aten.mm.default" and operand == self.gradient:
            self._write_padded(node)
        else:
            name = self.writer.new_name(f"{node.name}{MOVED_SUFFIX}")
            self.writer.add(unmeasured(changed, name=name))

    def _write_padded(self, node: Node) -> None:
        """Write the gradient of the layer's input: zero in the rows that the slice leaves out."""
        part = self.part
        (result,) = node.results
        storage = self.writer.new_storage(self._slice_bytes(self._elements_bytes(result.name)))
        args: Args = (Ref(self.names[self.gradient]), *node.args[1:])
        width = result.tensor.shape[1]
        meta = _row_major_meta(result.tensor, (part.slice_rows, width))
        name = self._write_node(node, node.target, args, meta, storage)
        shape = (*part.shape[:-1], width)
        sliced = part.sliced_shape(shape)
        assert sliced is not None
        args = (Ref(name), sliced)
        name = self._write_node(
            node, "aten.view.default", args, _row_major_meta(meta, sliced), storage
        )
        after = part.shape[part.dimension] - part.end
        pads = (*(0, 0) * (len(shape) - 1 - part.dimension), part.start, after)
        args, meta = (Ref(name), pads, 0.0), _row_major_meta(meta, shape)
        name = self._write_node(node, "aten.constant_pad_nd.default", args, meta, result.storage)
        self.writer.add(
            unmeasured(
                node, name=self.writer.new_name(f"{result.name}{MOVED_SUFFIX}"), view=True,
                target="aten.view.default", args=(Ref(name), result.tensor.shape),
            )
        )  # fmt: skip

    def _write_rows(self, node: Node, names: Mapping[str, str], storages: dict[int, int]) -> str:
        """Write a node of the layer or of its gradient with the slice's rows of operands with these
        new `names`, and return the name of its result. `storages` has the new storage of each old
        one."""
        (result,) = node.results
        shape = self.part.sliced_shape(result.tensor.shape)
        assert shape is not None
        if result.storage not in storages:
            size_bytes = self.old.storage_bytes[result.storage]
            storages[result.storage] = self.writer.new_storage(self._slice_bytes(size_bytes))
        args = node.with_operands(names).args
        if node.target in VIEWS:
            args = (args[0], shape)
        meta = _row_major_meta(result.tensor, shape)
        return self._write_node(
            node, node.target, args, meta, storages[result.storage], node.kwargs
        )

    def _write_node(
        self,
        like: Node,
        target: str,
        args: Args,
        tensor: TensorMeta,
        storage: int,
        kwargs: Kwargs | None = None,
    ) -> str:
        """Write a node with one result, in the module of `like`, and return the result's name."""
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

    def _slice_bytes(self, size_bytes: int) -> int:
        """Return the bytes of the slice's rows of a tensor, from the bytes of all its rows."""
        return size_bytes * self.part.slice_rows // self.part.rows


def _row_major_meta(tensor: TensorMeta, shape: Sequence[int]) -> TensorMeta:
    """Return the metadata of a tensor like `tensor`, but contiguous and of this shape."""
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return tensor.model_copy(update={"shape": tuple(shape), "stride": stride, "offset": 0})
