"""`Trace`: the joint forward+backward graph of one training step, as a document without torch.

Made by `remat.trace`, priced by `remat.measure`, solved by `remat.solve`. It holds operation names,
arguments, shapes and costs; no weights and no code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from remat.documents.arguments import refs
from remat.documents.base import Document, Path_
from remat.documents.records import (
    Environment,
    Gradient,
    Node,
    Output,
    Placeholder,
)
from remat.documents.structure import Structure
from remat.errors import RematError
from remat.graph import Graph, Operation, Value

BOUNDARY = "backward_start"
"""Name of the pseudo operation that starts the backward pass and brings the tangents."""

CUDA_ALIGNMENT_BYTES = 512
"""The CUDA caching allocator rounds every request up to a multiple of this."""

COPY = "aten.copy_.default"
"""Writes a new value into a mutated buffer or input; the one operation with a side effect."""

ACCUMULATE = "remat.accumulate.default"
"""Adds a gradient into the `.grad` that is already there, and frees it."""

ADD_INTO = "remat.add_into.default"
"""Adds the second gradient of a tied parameter into the first, in place."""


class Trace(Document):
    """A training step as data. `nodes` are in execution order; names are unique."""

    FORMAT: ClassVar[str] = "remat.trace"
    VERSION: ClassVar[int] = 1

    model: Annotated[Path_, Field(max_length=500)] = ""
    device: str = Field(max_length=40)
    gpu: str = Field(default="", max_length=40)
    """The GPU whose operations these are, by the name of its data sheet (`remat.costs.devices`); ""
    for a CPU, and for a GPU that has none there."""
    placeholders: tuple[Placeholder, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    gradients: tuple[Gradient, ...]
    storages: tuple[int, ...]
    inputs: Structure
    result: Structure
    environment: Environment
    accumulating: bool = False
    """Gradients are already there and are added to, as in gradient accumulation."""
    outputs_dropped: bool = False
    """Nobody holds the outputs when the backward starts, but the backward where it reads them."""
    library_bytes: int = Field(default=0, ge=0, lt=2**63)
    """What libraries hold on the device during the step (cuBLAS workspaces)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_names(self)
        return self

    @property
    def place(self) -> str:
        """The device, for people: "cpu", "cuda:0 (h100)"."""
        return f"{self.device} ({self.gpu})" if self.gpu else self.device

    @property
    def measured(self) -> bool:
        """Whether every operation has a cost."""
        return all(node.view or node.cost_s is not None for node in self.nodes)

    @property
    def cost_source(self) -> str:
        """Where the costs come from, in words: how many operations by source."""
        counts = Counter(n.cost_source or "unknown" for n in self.nodes if not n.view)
        if len(counts) == 1:
            return next(iter(counts))
        return "; ".join(f"{count} operations {source}" for source, count in counts.most_common(4))

    def launch_s(self, runs: Iterable[int]) -> float | None:
        """Seconds of the CPU to launch these operations of `graph()`, by number; None where nobody
        has measured it, as on a CPU."""
        nodes = [node for node in map(self.operations.__getitem__, runs) if node is not None]
        if all(node.launch_s is None for node in nodes):
            return None
        return sum(node.launch_s or 0.0 for node in nodes)

    def replace(self, **changes: Any) -> Trace:
        """A copy with some fields changed, validated again. (`model_copy` would carry the cached
        graph along.)"""
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | changes))

    @cached_property
    def storage_of(self) -> dict[str, int]:
        """The storage of each named tensor."""
        found = {p.name: p.storage for p in self.placeholders}
        found.update((r.name, r.storage) for node in self.nodes for r in node.results)
        return found

    @cached_property
    def operations(self) -> tuple[Node | None, ...]:
        """The node of each operation of `graph()`, in order; None is the boundary."""
        nodes = [node for node in self.nodes if not node.view]
        forward = [node for node in nodes if not node.backward]
        return (*forward, None, *(node for node in nodes if node.backward))

    def graph(self) -> Graph:
        """What the solver sees. Sizes are rounded as the device's allocator rounds.

        Raises `RematError` where operations have no cost yet.
        """
        return self._graph

    @cached_property
    def _graph(self) -> Graph:
        if not self.measured:
            raise RematError(
                "this trace has no costs yet: call remat.measure(trace, device=...) with 'cpu', "
                "'cuda' or remat.Roofline('h200') first"
            )
        return _build_graph(self)

    def allocated_bytes(self, storage: int) -> int:
        """Bytes that the device's allocator sets aside for a storage."""
        size = self.storages[storage]
        if self.device.startswith("cuda"):
            return -(-size // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES
        return size


def _build_graph(trace: Trace) -> Graph:
    constants = {p.storage for p in trace.placeholders if p.kind != "tangent"}
    tangents = {p.storage for p in trace.placeholders if p.kind == "tangent"}
    value_of: dict[int, int] = {}
    values: list[Value] = []

    def value(storage: int, name: str) -> int:
        if storage not in value_of:
            value_of[storage] = len(values)
            values.append(Value(name, trace.allocated_bytes(storage)))
        return value_of[storage]

    operations: list[Operation] = []
    boundary = 0
    changing = {
        r.storage for node in trace.nodes if not node.view for r in node.results
    } & constants
    for node in trace.operations:
        if node is None:
            boundary = len(operations)
            names = {p.storage: p.name for p in trace.placeholders}
            made = tuple(value(s, names[s]) for s in sorted(tangents - constants))
            read = tuple(sorted(value_of[s] for s in dropped_storages(trace) if s in value_of))
            start = Operation(BOUNDARY, read, made, 0.0, backward=True, recomputable=False)
            operations.append(start)
            continue
        read = {trace.storage_of[n] for n in (*refs(node.args), *refs(node.kwargs))}
        written = {r.storage: r.name for r in node.results}
        operations.append(
            Operation(
                name=node.name,
                inputs=tuple(sorted(value_of[s] for s in read if s not in constants)),
                outputs=tuple(value(s, n) for s, n in written.items()),
                cost_s=node.cost_s or 0.0,
                workspace_bytes=node.workspace_bytes or 0,
                backward=node.backward,
                recomputable=node.recomputable,
                module=node.module,
                sequenced=node.seeded or not changing.isdisjoint({*read, *written}),
            )
        )
    held = held_storages(trace)
    resident = sum(trace.allocated_bytes(s) for s in constants)
    resident += trace.library_bytes
    if trace.accumulating:
        resident += accumulated_bytes(trace)
    return Graph(
        operations=tuple(operations),
        values=tuple(values),
        results=frozenset(value_of[s] for s in held if s in value_of),
        constant_bytes=resident,
        boundary=boundary,
        library_bytes=trace.library_bytes,
    )


def held_storages(trace: Trace) -> set[int]:
    """Storages that somebody outside of the step holds to its end: outputs that are not dropped,
    gradients (but not those that are added into a `.grad`), and the gradient of a scalar loss,
    which `loss.backward()` itself holds until it returns."""
    accumulated = {
        name for node in trace.nodes if node.target == ACCUMULATE for name in refs(node.args[1])
    }
    frees = trace.environment.frees_tangents
    held = {
        p.storage
        for p in trace.placeholders
        if p.kind == "tangent" and (not frees or not p.tensor.shape)
    }
    held |= {trace.storage_of[o.name] for o in trace.outputs} - dropped_storages(trace)
    return held | {trace.storage_of[g.name] for g in trace.gradients if g.name not in accumulated}


def dropped_storages(trace: Trace) -> set[int]:
    """Storages of outputs that nobody holds once the backward has started. `loss.backward()` holds
    the loss."""
    if not trace.outputs_dropped:
        return set()
    losses = {p.name for p in trace.placeholders if p.kind == "tangent" and not p.tensor.shape}
    kept = {trace.storage_of[o.name] for o in trace.outputs if o.tangent in losses}
    return {trace.storage_of[o.name] for o in trace.outputs} - kept


def trained(trace: Trace) -> list[Placeholder]:
    """The parameters that get a gradient."""
    owners = {g.placeholder for g in trace.gradients}
    return [p for p in trace.placeholders if p.kind == "parameter" and p.name in owners]


def accumulated_bytes(trace: Trace) -> int:
    """Bytes of the `.grad` tensors that gradient accumulation finds in place."""
    return sum(trace.allocated_bytes(p.storage) for p in trained(trace))


def _check_names(trace: Trace) -> None:
    """Every name is unique and defined before it is used; every storage exists."""
    known: set[str] = set()

    def define(name: str, storage: int) -> None:
        if name in known or name == BOUNDARY:
            raise ValueError(f"the name {name} is defined twice")
        if not 0 <= storage < len(trace.storages):
            raise ValueError(f"{name} lives in storage {storage}, which does not exist")
        known.add(name)

    if any(not 0 <= size < 2**63 for size in trace.storages):
        raise ValueError("storages need sizes of zero or more bytes, below 2**63")
    for placeholder in trace.placeholders:
        define(placeholder.name, placeholder.storage)
    owned = {p.storage for p in trace.placeholders}
    late = {p.name for p in trace.placeholders if p.kind == "tangent"}
    early = {p.storage for p in trace.placeholders if p.kind != "tangent"}
    for node in trace.nodes:
        used = (*refs(node.args), *refs(node.kwargs))
        if unknown := [name for name in used if name not in known]:
            raise ValueError(f"operation {node.name} uses {unknown[0]} before it is defined")
        if not node.backward and (wrong := [name for name in used if name in late]):
            raise ValueError(
                f"operation {node.name} of the forward uses {wrong[0]} of the backward"
            )
        if node.backward:
            late.update(r.name for r in node.results)
        if node.target == ACCUMULATE and (len(node.args) != 2 or len(used) != 2):
            raise ValueError(f"operation {node.name} needs a parameter and a gradient")
        storages = {r.storage for r in node.results}
        if not node.backward and node.view and not storages <= early:
            raise ValueError(f"operation {node.name} of the forward views a tensor of the backward")
        if node.view != (bool(storages) and storages <= owned):
            raise ValueError(f"operation {node.name} is wrongly marked as view={node.view}")
        if not node.view and storages & owned:
            raise ValueError(f"operation {node.name} writes a storage that already has an owner")
        owned |= storages
        if not node.backward:
            early |= storages
        for result in node.results:
            define(result.name, result.storage)
    tangents = {p.name for p in trace.placeholders if p.kind == "tangent"}
    for output in trace.outputs:
        if output.name not in known or output.name in late:
            raise ValueError(f"the output {output.name} is not defined in the forward")
        if output.tangent and output.tangent not in tangents:
            raise ValueError(f"{output.tangent} is no tangent")
    for gradient in trace.gradients:
        if not {gradient.placeholder, gradient.name} <= known:
            raise ValueError(f"the gradient {gradient.name} is not defined")
    if sorted(set(trace.result.leaves())) != list(range(len(trace.outputs))):
        raise ValueError("the result's leaves are not the outputs")
