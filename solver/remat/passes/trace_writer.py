"""`TraceWriter`: new operations, storages and names, for a pass that changes a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from remat.documents.arguments import Args, Ref
from remat.documents.records import BaselineRecord, Node, Result, TensorMeta
from remat.documents.targets import OVERWRITING_TARGETS
from remat.documents.trace import Trace
from remat.passes.split.states import Rows, piece_shape, rows_stride
from remat.simulate import baseline_of


@dataclass
class TraceWriter:
    """The operations and storages of a new trace so far. The old one's storages and names stay
    valid; `replaced_nodes` are names of operations that the new trace does not have."""

    old: Trace
    replaced_nodes: frozenset[str] = frozenset()
    nodes: list[Node] = field(default_factory=list)
    piece: int = 0
    """The number of the piece that is being written."""

    def __post_init__(self) -> None:
        self.storage_bytes = list(self.old.storage_bytes)
        self._storages = dict(self.old.storage_of)
        self._tensors = set(self._storages)
        self._node_names = {n.name for n in self.old.nodes} - self.replaced_nodes

    def trace(self, **changes: Any) -> Trace:
        """Return the new trace, with `changes` of other fields. Where the old trace has costs, the
        new one records the peak and the time of the step before any pass."""
        unsplit = self.old.unsplit
        if unsplit is None and self.old.measured:
            baseline = baseline_of(self.old.graph())
            unsplit = BaselineRecord(peak_bytes=baseline.peak_bytes, time_s=baseline.time_s)
        return self.old.replace(
            nodes=tuple(self.nodes),
            storage_bytes=tuple(self.storage_bytes),
            unsplit=unsplit,
            **changes,
        )

    def new_name(self, name: str) -> str:
        """Return a name for a tensor and an operation: `name`, or that with a number."""
        unique, number = name, 1
        while unique in self._tensors or unique in self._node_names:
            number += 1
            unique = f"{name}_{number}"
        self._tensors.add(unique)
        return unique

    def add(self, node: Node) -> None:
        """Add an operation."""
        self.nodes.append(node)
        self._storages.update((result.name, result.storage) for result in node.results)

    def storage_of(self, name: str) -> int:
        """Return the storage of a tensor of the old trace or of the new one."""
        return self._storages[name]

    def new_storage(self, size_bytes: int) -> int:
        """Add a storage, and return its index."""
        self.storage_bytes.append(size_bytes)
        return len(self.storage_bytes) - 1

    def append(
        self, like: Node, target: str, args: Args, result: Result, *, view: bool = False
    ) -> None:
        """Add an operation with one result. It belongs to the module and to the forward or backward
        of `like`, and to the piece that is being written. It may be recomputed, unless it writes
        over its argument."""
        name = self.new_name(f"{result.name}_op") if self._is_name_taken(result) else result.name
        self.add(
            Node(
                name=name,
                target=target,
                args=args,
                results=(result,),
                view=view,
                backward=like.backward,
                recomputable=target not in OVERWRITING_TARGETS,
                module=like.module,
                piece_of=like.name,
                piece=self.piece,
            )
        )

    def _is_name_taken(self, result: Result) -> bool:
        """True if an operation that the new trace keeps has the name of this result."""
        return result.name in self._node_names

    def append_slice(
        self, like: Node, name: str, meta: TensorMeta, state: Rows, start: int, rows: int
    ) -> str:
        """Add the views that select `rows` rows from `start` on of the tensor `name`, whose rows
        are the dimensions of `state`. Return the name of the last view."""
        storage, stride = self.old.storage_of[name], rows_stride(meta, state) or 0
        before, after = state.first, state.first + state.count
        total = 1
        for dimension in state.dimensions:
            total *= meta.shape[dimension]
        flat_shape = (*meta.shape[:before], total, *meta.shape[after:])
        strides = (*meta.stride[:before], stride, *meta.stride[after:])

        def view(of: str, target: str, args: Args, **changes: object) -> str:
            tensor = meta.model_copy(update={"stride": strides, **changes})
            result = Result(name=self.new_name(f"{name}_part"), tensor=tensor, storage=storage)
            self.append(like, target, (Ref(of), *args), result, view=True)
            return result.name

        current = name
        if state.count > 1:
            current = view(current, "aten.view.default", (flat_shape,), shape=flat_shape)
        elements, first = rows * state.block, start * state.block
        part_shape = (*flat_shape[:before], elements, *flat_shape[before + 1 :])
        offset = meta.offset + first * stride
        arguments = (before, first, first + elements)
        current = view(current, "aten.slice.Tensor", arguments, shape=part_shape, offset=offset)
        if state.count > 1:
            shape = piece_shape(meta.shape, state, rows)
            ones = (stride * elements,) * (state.count - 1)
            strides = (*meta.stride[:before], *ones, stride, *meta.stride[after:])
            current = view(current, "aten.view.default", (shape,), shape=shape, offset=offset)
        return current


def unmeasured(node: Node, **changes: Any) -> Node:
    """Return a node with changes, without the costs that were measured before them."""
    costs = {"cost_s": None, "launch_s": None, "workspace_bytes": None, "cost_source": ""}
    return node.model_copy(update={**costs, **changes})
