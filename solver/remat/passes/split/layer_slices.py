"""Slices of the results of linear layers, with the operations of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from remat.documents.arguments import Ref
from remat.documents.records import Node
from remat.documents.trace import Trace
from remat.passes.split.regions import TraceIndex

PRODUCTS = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""The position of the argument whose rows are the result's."""

VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
TRANSPOSES = ("aten.t.default", "aten.permute.default", "aten.transpose.int")
CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_MIN_SHARE = 0.25
"""The smallest result whose slice counts, as a share of the largest tensor of the step."""


@dataclass(frozen=True)
class LayerSlice:
    """A slice of a linear layer's result: `[..., start:end, ...]` in `dimension` of the `shape`.

    All others are indices of nodes. `forward` are those from the slice up to the product, `copy` is
    the copy of the slice into a tensor of its own, None if the slice is contiguous. `backward` are
    those from the padding of the slice's gradient down to the gradient of the product, and
    `gradients` those that read it: transposes, products and sums over the rows.
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
    """Return the name of the gradient that a node pads with zeros to that of the slice's source; ""
    if it does nothing of that kind."""
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
