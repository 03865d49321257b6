"""`Trace`: the joint forward and backward graph of one training step, as a document without torch.

`remat.trace` creates it, `remat.measure` adds costs, and `remat.solve` plans it. It contains
operation names, arguments, shapes and costs, but no weights and no code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from remat.documents.arguments import Ref, referenced_names
from remat.documents.base import Document, DottedPath, Size
from remat.documents.records import (
    BaselineRecord,
    Environment,
    Gradient,
    Node,
    Output,
    Placeholder,
    Result,
    SplitRecord,
    Store,
    TensorMeta,
)
from remat.documents.structure import Structure, check_output_leaves
from remat.documents.targets import (
    ACCUMULATE_TARGET,
    ARRIVE_TARGET,
    BOUNDARY_NAME,
    OFFLOAD_TARGET,
    OVERWRITING_TARGETS,
    RELEASE_TARGET,
)
from remat.documents.writes import OUT_VARIANTS, is_write, written_buffer
from remat.errors import RematError
from remat.graph import Graph, Operation, Value

CUDA_ALIGNMENT_BYTES = 512
"""The CUDA caching allocator rounds every request up to a multiple of this."""


class Trace(Document):
    """A captured training step as data. `nodes` are in execution order. Names are unique, except
    that the result of `remat.arrive` has the name of the tensor that it brings back.

    `inputs` is the structure of the model's arguments, `result` the structure of its return value.
    `stores` are values that the model stores in attributes or arguments. The leaves of `result` and
    `stores` are indices of `outputs`.
    """

    FORMAT: ClassVar[str] = "remat.trace"
    VERSION: ClassVar[int] = 2

    model: Annotated[DottedPath, Field(max_length=500)] = ""
    device: str = Field(max_length=40)
    gpu: str = Field(default="", max_length=40)
    """The name of the data sheet (`remat.costs.devices`) of the GPU that the step was captured for.
    Empty for a CPU, and for a GPU without a data sheet."""
    placeholders: tuple[Placeholder, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    gradients: tuple[Gradient, ...]
    storage_bytes: tuple[Size, ...]
    """The size of each storage. Tensors refer to it by its index."""
    inputs: Structure
    result: Structure
    stores: tuple[Store, ...] = ()
    environment: Environment
    accumulates_gradients: bool = False
    """True if every parameter has a `.grad` already, into which the step adds its gradient."""
    outputs_dropped: bool = False
    """True if the caller releases the outputs before the backward starts: they stay in memory only
    until the backward has read them."""
    reuses_memory: bool = False
    """True if operations of the backward write over arguments that nothing reads later; see
    `reusable_arguments`. Traces of earlier versions do not."""
    library_bytes: Size = 0
    """Bytes that libraries allocate on the device for the whole step (cuBLAS workspaces)."""
    external_bytes: Size = 0
    """Bytes that are allocated outside of the graph for the whole step: by other calls in flight,
    and by the tensors that non-leaf parameters are computed from (`torch.func.functional_call`)."""
    boundary_bytes: Size = 0
    """Workspace of the boundary: bytes of the budget that are free when the forward ends."""
    splits: tuple[SplitRecord, ...] = ()
    """The groups of operations that were split into pieces, in the order in which they were."""
    unsplit: BaselineRecord | None = None
    """The step before the splits, with its costs; None if there were none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_trace(self)
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Yield what `repr` shows of the trace."""
        backward = sum(node.backward for node in self.nodes if not node.view)
        yield "model", self.model
        yield "device", self.device_label
        yield "forward_operations", len(self.operations) - 1 - backward
        yield "backward_operations", backward
        yield "costs", self.cost_source if self.measured else "not measured"

    @property
    def device_label(self) -> str:
        """The device as text for messages: "cpu", "cuda:0 (h100)"."""
        return f"{self.device} ({self.gpu})" if self.gpu else self.device

    @property
    def measured(self) -> bool:
        """True if every operation has a cost."""
        return all(node.view or node.cost_s is not None for node in self.nodes)

    @property
    def cost_source(self) -> str:
        """Text that says where the costs come from, such as "measured" or how many operations have
        which source."""
        counts = Counter(n.cost_source or "unknown" for n in self.nodes if not n.view)
        if len(counts) == 1:
            return next(iter(counts))
        return "; ".join(f"{count} operations {source}" for source, count in counts.most_common(4))

    def launch_s(self, runs: Iterable[int]) -> float | None:
        """Return the CPU time in seconds to launch these operations, which are indices into
        `graph().operations`. None if it was not measured, as for a CPU."""
        nodes = [node for node in map(self.operations.__getitem__, runs) if node is not None]
        if all(node.launch_s is None for node in nodes):
            return None
        return sum(node.launch_s or 0.0 for node in nodes)

    def replace(self, **changes: Any) -> Trace:
        """Return a validated copy with some fields changed. (`model_copy` would also copy the
        cached graph.)"""
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | changes))

    @cached_property
    def storage_of(self) -> dict[str, int]:
        """The index of the storage of each named tensor."""
        storages = {p.name: p.storage for p in self.placeholders}
        storages.update((r.name, r.storage) for node in self.nodes for r in node.results)
        return storages

    @cached_property
    def operands(self) -> tuple[tuple[str, ...], ...]:
        """The names of the tensors among the arguments of each node."""
        return tuple(node.operand_names for node in self.nodes)

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        """The metadata of each named tensor."""
        tensors = {p.name: p.tensor for p in self.placeholders}
        tensors.update((r.name, r.tensor) for node in self.nodes for r in node.results)
        return tensors

    @cached_property
    def operations(self) -> tuple[Node | None, ...]:
        """The node of each operation of `graph()`, in order; None for the boundary between forward
        and backward."""
        nodes = [node for node in self.nodes if not node.view]
        forward = [node for node in nodes if not node.backward]
        return (*forward, None, *(node for node in nodes if node.backward))

    def graph(self) -> Graph:
        """Return the graph for the solver. Sizes are rounded as the device's allocator rounds.

        Raises `RematError` if operations have no cost yet.
        """
        return self._graph

    @cached_property
    def graph_of_sizes(self) -> Graph:
        """The same graph, in which operations that were not measured cost nothing."""
        return self._graph if self.measured else _build_graph(self)

    @cached_property
    def _graph(self) -> Graph:
        if not self.measured:
            raise RematError(
                "this trace has no costs yet: call remat.measure(trace, device=...) with 'cpu', "
                "'cuda' or remat.Roofline('h200') first"
            )
        return _build_graph(self)

    @cached_property
    def reusable_arguments(self) -> dict[str, str]:
        """The argument that an operation may write its result over if the schedule frees it with
        this operation, by the operation's name; see the function of this name."""
        return reusable_arguments(
            self, storages_live_at_end(self), writes_only=not self.reuses_memory
        )

    def overwritten_storages(self, node: Node) -> tuple[int, ...]:
        """Return the storage that an operation of `OVERWRITING_TARGETS` writes its result over."""
        match node.args:
            case (Ref(name), *_) if node.target in OVERWRITING_TARGETS:
                return (self.storage_of[name],)
        return ()

    def allocated_bytes(self, storage: int) -> int:
        """Return the bytes that the device's allocator reserves for a storage, given its index."""
        size = self.storage_bytes[storage]
        if self.device.startswith("cuda"):
            return -(-size // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES
        return size

    def placeholder_bytes(self) -> dict[str, int]:
        """Return the bytes of the placeholders that exist before the step, by their kind. Shared
        storages count once."""
        sizes: dict[str, int] = defaultdict(int)
        kinds = {p.storage: p.kind for p in reversed(self.placeholders) if p.kind != "tangent"}
        for storage, kind in kinds.items():
            sizes[kind] += self.allocated_bytes(storage)
        return sizes


def _build_graph(trace: Trace) -> Graph:
    """Return the graph of a trace. Operations without a cost cost nothing."""
    constants = {p.storage for p in trace.placeholders if p.kind != "tangent"}
    tangents = {p.storage for p in trace.placeholders if p.kind == "tangent"}
    value_of: dict[int, int] = {}  # by storage
    values: list[Value] = []

    def value(storage: int, name: str) -> int:
        """Return the value of a storage; add it at the first call."""
        if storage not in value_of:
            value_of[storage] = len(values)
            values.append(Value(name, trace.allocated_bytes(storage)))
        return value_of[storage]

    operations: list[Operation] = []
    sender_of: dict[str, int] = {}  # the operation that made each handle
    boundary = 0
    mutated = {r.storage for node in trace.nodes if not node.view for r in node.results} & constants
    for node in trace.operations:
        if node is None:
            boundary = len(operations)
            names = {p.storage: p.name for p in trace.placeholders}
            produced = tuple(value(s, names[s]) for s in sorted(tangents - constants))
            dropped = (value_of[s] for s in dropped_output_storages(trace) if s in value_of)
            operations.append(
                Operation(
                    name=BOUNDARY_NAME,
                    inputs=tuple(sorted(dropped)),
                    outputs=produced,
                    cost_s=0.0,
                    workspace_bytes=trace.boundary_bytes,
                    backward=True,
                    recomputable=False,
                )
            )
            continue
        read = {trace.storage_of[name] for name in node.operand_names}
        written = {r.storage: r.name for r in node.results}
        overwritten = trace.overwritten_storages(node)
        if node.name in trace.reusable_arguments:
            overwritten = (trace.storage_of[trace.reusable_arguments[node.name]],)
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
                order_sensitive=node.random or not mutated.isdisjoint({*read, *written}),
                overwrites=tuple(value_of[s] for s in overwritten),
                renews=tuple(value_of[s] for s in written) if node.target == ARRIVE_TARGET else (),
                same_copy_as=(
                    sender_of[node.operand_names[0]] if node.target == RELEASE_TARGET else -1
                ),
                piece_of=node.piece_of,
                piece=node.piece,
            )
        )
        if node.target == OFFLOAD_TARGET:
            sender_of[node.results[0].name] = len(operations) - 1
    constant_bytes = sum(trace.allocated_bytes(s) for s in constants)
    constant_bytes += trace.library_bytes + trace.external_bytes
    if trace.accumulates_gradients:
        constant_bytes += accumulated_gradient_bytes(trace)
    unsplit = trace.unsplit
    return Graph(
        operations=tuple(operations),
        values=tuple(values),
        results=frozenset(value_of[s] for s in storages_live_at_end(trace) if s in value_of),
        constant_bytes=constant_bytes,
        boundary=boundary,
        library_bytes=trace.library_bytes,
        unsplit=None if unsplit is None else unsplit.to_baseline(),
        splits=tuple(record.to_split() for record in trace.splits),
    )


def storages_live_at_end(trace: Trace) -> set[int]:
    """Return the storages that the caller still references when the step ends.

    These are the outputs that are not dropped, the gradients that are not added into a `.grad`, the
    gradient of a scalar loss, which `loss.backward()` references until it returns, and the other
    tangents unless this torch lets the backward free them (`Environment.frees_tangents`).
    """
    accumulated = {
        name
        for node in trace.nodes
        if node.target == ACCUMULATE_TARGET
        for name in referenced_names(node.args[1])
    }
    frees_tangents = trace.environment.frees_tangents
    storages = {
        p.storage
        for p in trace.placeholders
        if p.kind == "tangent" and (not frees_tangents or not p.tensor.shape)
    }
    storages |= {trace.storage_of[o.name] for o in trace.outputs} - dropped_output_storages(trace)
    return storages | {
        trace.storage_of[g.name] for g in trace.gradients if g.name not in accumulated
    }


def dropped_output_storages(trace: Trace) -> set[int]:
    """Return the storages of outputs that the caller does not reference once the backward has
    started. The loss is not among them: `loss.backward()` references it. Nor are stored outputs."""
    if not trace.outputs_dropped:
        return set()
    losses = {p.name for p in trace.placeholders if p.kind == "tangent" and not p.tensor.shape}
    retained = {
        trace.storage_of[o.name] for o in trace.outputs if o.is_stored or o.tangent in losses
    }
    return {trace.storage_of[o.name] for o in trace.outputs} - retained


def trained_parameters(trace: Trace) -> list[Placeholder]:
    """Return the placeholders of the parameters that get a gradient."""
    names = {g.placeholder for g in trace.gradients}
    return [p for p in trace.placeholders if p.kind == "parameter" and p.name in names]


def convolution_nodes(trace: Trace) -> list[Node]:
    """Return the convolutions of a step, those of the backward too."""
    return [node for node in trace.nodes if "convolution" in node.target and not node.view]


def accumulated_gradient_bytes(trace: Trace) -> int:
    """Return the bytes of the existing `.grad` tensors that gradient accumulation adds to."""
    return sum(trace.allocated_bytes(p.storage) for p in trained_parameters(trace))


# -- memory reuse ---------------------------------------------------------------------------------


def reusable_arguments(
    trace: Trace,
    retained: Container[int],
    arriving: Iterable[int] = (),
    *,
    writes_only: bool = False,
) -> dict[str, str]:
    """Map each operation that may write its result over its first argument to that argument, by
    names.

    The argument is a temporary of the backward: it is not a parameter, saved tensor, tangent,
    output or gradient (`retained` has the storages of the last two), and `AccumulateGrad` has not
    read it, since that may keep it as `.grad`. The operation is its last reader in the trace. A
    schedule in which another operation reads it later overwrites nothing there. `arriving` are
    storages that are copied back from the host: the copy is a temporary of the backward, too.

    A write (`remat.documents.writes`) may overwrite its buffer under the same conditions; in the
    forward, an operation of the forward must have produced the buffer. With `writes_only`, only
    writes overwrite an argument.
    """
    temporaries = set(arriving)
    of_forward: set[int] = set()
    last_reader: dict[int, str] = {}
    for node, operands in zip(trace.nodes, trace.operands, strict=True):
        if node.view:
            continue
        read = {trace.storage_of[name] for name in operands}
        last_reader.update(dict.fromkeys(read, node.name))
        of_phase = temporaries if node.backward else of_forward
        of_phase.update(r.storage for r in node.results if r.storage not in retained)
        if node.target == ACCUMULATE_TARGET:
            temporaries -= read
    arguments: dict[str, str] = {}
    for node in trace.nodes:
        argument = None
        if is_write(node):
            argument = written_buffer(node)
        elif node.backward and node.target in OUT_VARIANTS and not writes_only:
            argument = _overwritable_first_argument(trace, node)
        if argument is None:
            continue
        storage = trace.storage_of[argument]
        is_temporary = storage in (temporaries if node.backward else of_forward)
        if is_temporary and last_reader[storage] == node.name:
            arguments[node.name] = argument
    return arguments


def _overwritable_first_argument(trace: Trace, node: Node) -> str | None:
    """Return the name of the first argument if it has the dtype, shape, strides and storage size of
    the result, and a storage that no other argument shares; else None. Complex tensors are never
    overwritten: they may be lazily conjugated views."""
    match node.args, node.results:
        case (Ref(name), *_), (result,):
            meta, storage = trace.tensors[name], trace.storage_of[name]
            others = {*node.operand_names} - {name}
            is_alike = (
                (meta.dtype, meta.shape, meta.stride)
                == (result.tensor.dtype, result.tensor.shape, result.tensor.stride)
                and not meta.dtype.startswith("complex")
                and trace.storage_bytes[storage] == trace.storage_bytes[result.storage]
                and all(trace.storage_of[other] != storage for other in others)
            )
            return name if is_alike else None
    return None


# -- checks ---------------------------------------------------------------------------------------


def _check_trace(trace: Trace) -> None:
    """Raise ValueError unless every name is unique and defined before it is used, every storage
    exists, and views, writes, copies, outputs and gradients are valid."""
    defined: dict[str, int] = {}  # storage by name
    overwritten: set[int] = set()
    arrived: set[str] = set()

    def define(name: str, storage: int) -> None:
        if name in defined or name == BOUNDARY_NAME:
            raise ValueError(f"the name {name} is defined twice")
        if storage >= len(trace.storage_bytes):
            raise ValueError(f"{name} lives in storage {storage}, which does not exist")
        defined[name] = storage

    for placeholder in trace.placeholders:
        define(placeholder.name, placeholder.storage)
    owned_by_caller = {p.storage for p in trace.placeholders}
    owned_by_caller |= {
        trace.storage_of.get(item.name, -1) for item in (*trace.outputs, *trace.gradients)
    }
    node_names = {BOUNDARY_NAME}
    written_storages = {p.storage for p in trace.placeholders}
    backward_names = {p.name for p in trace.placeholders if p.kind == "tangent"}
    forward_storages = {p.storage for p in trace.placeholders if p.kind != "tangent"}
    for node, used in zip(trace.nodes, trace.operands, strict=True):
        if node.name in node_names:
            raise ValueError(f"the operation {node.name} is defined twice")
        node_names.add(node.name)
        if undefined := [name for name in used if name not in defined]:
            raise ValueError(f"operation {node.name} uses {undefined[0]} before it is defined")
        if lost := [name for name in used if defined[name] in overwritten]:
            raise ValueError(f"operation {node.name} reads {lost[0]} after it was overwritten")
        overwritten.update(_checked_overwriting(trace, node, owned_by_caller))
        if not node.backward and (wrong := [name for name in used if name in backward_names]):
            raise ValueError(
                f"operation {node.name} of the forward uses {wrong[0]} of the backward"
            )
        if node.backward:
            backward_names.update(r.name for r in node.results)
        if node.target == ACCUMULATE_TARGET and (len(node.args) != 2 or len(used) != 2):
            raise ValueError(f"operation {node.name} needs a parameter and a gradient")
        if node.target == ARRIVE_TARGET:
            _check_arrival(node, defined, arrived)
            continue
        storages = {r.storage for r in node.results}
        if not node.backward and node.view and not storages <= forward_storages:
            raise ValueError(f"operation {node.name} of the forward views a tensor of the backward")
        if node.view != (bool(storages) and storages <= written_storages):
            raise ValueError(f"operation {node.name} is wrongly marked as view={node.view}")
        if not node.view and storages & written_storages:
            raise ValueError(f"operation {node.name} writes a storage that another one produces")
        written_storages |= storages
        if not node.backward:
            forward_storages |= storages
        for result in node.results:
            define(result.name, result.storage)
        if is_write(node):
            _check_write(trace, node)
    tangents = {p.name for p in trace.placeholders if p.kind == "tangent"}
    for output in trace.outputs:
        if output.name not in defined or output.name in backward_names:
            raise ValueError(f"the output {output.name} is not defined in the forward")
        if output.tangent and output.tangent not in tangents:
            raise ValueError(f"{output.tangent} is no tangent")
    for gradient in trace.gradients:
        if gradient.placeholder not in defined or gradient.name not in defined:
            raise ValueError(f"the gradient {gradient.name} is not defined")
    check_output_leaves(trace.result, [store.value for store in trace.stores], len(trace.outputs))


def _check_arrival(node: Node, defined: dict[str, int], arrived: set[str]) -> None:
    """Raise ValueError unless a `remat.arrive` is in the backward, runs only once, and returns a
    tensor that is already `defined` and has not arrived before. Adds it to `arrived`."""
    match node.results:
        case (result,) if defined.get(result.name) == result.storage and result.name not in arrived:
            if node.backward and not node.recomputable and not node.view:
                arrived.add(result.name)
                return
    raise ValueError(
        f"operation {node.name} of the backward brings back, once, a tensor that the forward made"
    )


def _checked_overwriting(trace: Trace, node: Node, owned_by_caller: set[int]) -> tuple[int, ...]:
    """Return the storages that an operation overwrites. Raises ValueError if the caller owns one of
    them, or if another argument of the operation is in it."""
    storages = trace.overwritten_storages(node)
    if not storages:
        return ()
    others = (node.args[1:], *node.kwargs.values())
    if any(trace.storage_of[name] in storages for name in referenced_names(others)):
        raise ValueError(f"operation {node.name} reads the tensor that it overwrites")
    if not owned_by_caller.isdisjoint(storages):
        raise ValueError(f"operation {node.name} overwrites a tensor of the caller")
    return storages


def _check_write(trace: Trace, node: Node) -> None:
    """Raise ValueError unless a write has one result with the layout of its buffer."""
    name = written_buffer(node)
    before = trace.tensors[name]
    match node.results:
        case (Result(position=-1) as after,) if after.tensor == before:
            sizes_bytes = trace.storage_bytes
            if sizes_bytes[after.storage] == sizes_bytes[trace.storage_of[name]]:
                return
    raise ValueError(f"operation {node.name} must return one tensor with the layout of {name}")
