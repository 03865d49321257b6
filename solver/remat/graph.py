"""`Graph`: what the solver sees of a training step.

Operations in one fixed topological order, the values (storages) that they consume and produce,
their costs and sizes. It is independent of torch: a graph comes from a `Trace`, or from any
networkx DiGraph with `cost` and `size` on its nodes.

Terms, as used everywhere in remat:

* *operation*: one kernel call of the joint forward and backward graph;
* *value*: one storage of `size_bytes`; an operation consumes values and produces values;
* *constant memory*: parameters, buffers and batch; always allocated and counted in the budget;
* *result*: a value that must be retained from its first production to the end (loss, gradients);
* *boundary*: the operation that starts the backward pass. Runs before it belong to the forward
  program, runs after it to the backward program. It produces the tangents and runs once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from remat.errors import GraphError, wrong_type

if TYPE_CHECKING:
    import networkx as nx  # a fifth of the import of remat: loaded where it is used


@dataclass(frozen=True, slots=True)
class Value:
    """One storage. `size_bytes` is what the device's allocator reserves for it."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel call: consumes `inputs`, produces `outputs` (indices into `Graph.values`).

    `workspace_bytes` are allocated only while it runs. `recomputable=False` means that it runs
    exactly once. `module` is the path of the module that it belongs to, or "". `order_sensitive`
    operations sample random numbers or touch a buffer that changes: they keep their relative order
    in every order of the graph. The first run writes the outputs over those of the inputs
    `overwrites` that no later run reads, which then take no additional memory; a recomputation
    overwrites nothing. `renews` are outputs that an earlier operation produced: this one makes a
    new copy of them from elsewhere (the host's memory), once. `same_copy_as` is the index of an
    earlier operation, -1 for none: inputs that both read are not recomputed between them, so that
    both read the same copy. `piece_of` is the operation before the split of which this is piece
    number `piece`, or "".
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost_s: float
    workspace_bytes: int = 0
    backward: bool = False
    recomputable: bool = True
    module: str = ""
    order_sensitive: bool = False
    overwrites: tuple[int, ...] = ()
    renews: tuple[int, ...] = ()
    same_copy_as: int = -1
    piece_of: str = ""
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """The peak and the time of a step without recomputation."""

    peak_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """Operations around a tensor that the step runs on some of its rows at a time, in `pieces`.

    The rows are `dimension_count` dimensions of the tensor `seed`, from `first_dimension` on. The
    name is that of the tensor before the split, which the split graph may not have. `split_bytes`
    are those of the tensors that no longer exist as a whole. `with_previous` is True if this split
    and the one before it were found in the same graph, so that neither contains pieces of the
    other.
    """

    seed: str
    first_dimension: int
    dimension_count: int
    rows: int
    pieces: int
    module: str
    split_bytes: int
    with_previous: bool = False


@dataclass(frozen=True, slots=True)
class ValueLists:
    """A list of values for each operation, in one array: operation i has the `counts[i]`
    values from `starts[i]` on."""

    values: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Iterable[tuple[int, ...]]) -> ValueLists:
        """Return the lists, one for each operation, as arrays."""
        lists = list(lists)
        counts = np.array([len(values) for values in lists], dtype=np.int64)
        values = np.array([v for values in lists for v in values], dtype=np.int64)
        return cls(values, np.cumsum(counts) - counts, counts)

    def of_runs(self, runs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the values of a sequence of operations, one list after the other, and the position
        in `runs` that each is from."""
        counts = self.counts[runs]
        shifts = self.starts[runs] - (np.cumsum(counts) - counts)
        positions = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(shifts, counts)
        return self.values[positions], np.repeat(np.arange(len(runs), dtype=np.int64), counts)


@dataclass(frozen=True)
class Graph:
    """Operations in execution order with their values; validated on construction.

    Raises `GraphError` if a value is computed twice or never, is consumed before it is produced, or
    if a size or cost is negative or not finite.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    results: frozenset[int] = frozenset()
    constant_bytes: int = 0
    boundary: int | None = None
    library_bytes: int = 0
    """The part of `constant_bytes` that libraries allocate on the device (cuBLAS workspaces). No
    budget changes it, so percentages are of the rest: see `remat.limits.budget`."""
    unsplit: Baseline | None = None
    """The step before some of its operations were split into pieces; None if none were. Percentages
    of memory and time are relative to it."""
    splits: tuple[Split, ...] = ()
    """The groups of operations that were split into pieces."""

    def __post_init__(self) -> None:
        _validate_graph(self)

    def __len__(self) -> int:
        return len(self.operations)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """The operation that computes each value."""
        producer = [-1] * len(self.values)
        for index, operation in enumerate(self.operations):
            for value in set(operation.outputs) - set(operation.renews):
                producer[value] = index
        return tuple(producer)

    @cached_property
    def renewal(self) -> Mapping[int, int]:
        """The operation that renews a value, by value; values that none renews are missing."""
        return {v: index for index, o in enumerate(self.operations) for v in o.renews}

    @cached_property
    def no_recompute_spans(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """The spans in which operations are not recomputed (see `same_copy_as`), by operation:
        after the first run of one operation, up to the first run of another."""
        spans: dict[int, tuple[tuple[int, int], ...]] = {}
        for index, operation in enumerate(self.operations):
            if operation.same_copy_as >= 0:
                for op in {self.producer[v] for v in self.shared_inputs(operation)}:
                    spans[op] = (*spans.get(op, ()), (operation.same_copy_as, index))
        return spans

    def shared_inputs(self, operation: Operation) -> set[int]:
        """Return the inputs that an operation shares with its `same_copy_as`, which must be set."""
        return set(operation.inputs) & set(self.operations[operation.same_copy_as].inputs)

    def may_recompute(self, op: int, stage: int) -> bool:
        """True if an operation may be recomputed before the first run of the operation `stage`."""
        return self.operations[op].recomputable and not any(
            start < stage <= end for start, end in self.no_recompute_spans.get(op, ())
        )

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The operations that consume each value, in order."""
        consumers: list[list[int]] = [[] for _ in self.values]
        for index, operation in enumerate(self.operations):
            for value in operation.inputs:
                consumers[value].append(index)
        return tuple(tuple(users) for users in consumers)

    @cached_property
    def input_lists(self) -> ValueLists:
        """The values that each operation consumes, as arrays."""
        return ValueLists.of(operation.inputs for operation in self.operations)

    @cached_property
    def output_lists(self) -> ValueLists:
        """The values that each operation produces, as arrays."""
        return ValueLists.of(operation.outputs for operation in self.operations)

    @cached_property
    def overwrite_lists(self) -> ValueLists:
        """The values that the first run of each operation may overwrite, as arrays."""
        return ValueLists.of(operation.overwrites for operation in self.operations)

    @cached_property
    def size_array_bytes(self) -> NDArray[np.int64]:
        """The sizes of all values."""
        return np.array([value.size_bytes for value in self.values], dtype=np.int64)

    @cached_property
    def is_result(self) -> NDArray[np.bool_]:
        """True for each value that is a result."""
        is_result = np.zeros(len(self.values), dtype=np.bool_)
        is_result[list(self.results)] = True
        return is_result

    @cached_property
    def produced_array_bytes(self) -> NDArray[np.int64]:
        """`produced_bytes` as an array."""
        return np.array(self.produced_bytes, dtype=np.int64)

    @cached_property
    def costs_s(self) -> NDArray[np.float64]:
        """The costs of all operations."""
        return np.array([operation.cost_s for operation in self.operations], dtype=np.float64)

    @cached_property
    def produced_bytes(self) -> tuple[int, ...]:
        """The bytes that each operation needs in addition to its inputs: outputs and workspace."""
        return tuple(
            sum(self.values[v].size_bytes for v in o.outputs) + o.workspace_bytes
            for o in self.operations
        )

    @cached_property
    def min_produced_bytes(self) -> tuple[int, ...]:
        """`produced_bytes` of each operation, less the inputs that it may overwrite."""
        return tuple(
            size_bytes - sum(self.values[v].size_bytes for v in o.overwrites)
            for size_bytes, o in zip(self.produced_bytes, self.operations, strict=True)
        )

    @cached_property
    def total_cost_s(self) -> float:
        """Time of one step without recomputation, in seconds (or the graph's own cost unit)."""
        return math.fsum(operation.cost_s for operation in self.operations)

    @property
    def baseline_time_s(self) -> float:
        """The seconds that extra time is relative to: without recomputation, before any split."""
        return self.total_cost_s if self.unsplit is None else self.unsplit.time_s

    def to_networkx(self) -> nx.DiGraph:
        """Return a networkx DiGraph with one node per operation, of the same name.

        This is the inverse of `from_networkx` if every operation has one output. Edges have the
        names of the consumed values under `values`, and `overwritten` if their consumer overwrites
        them.
        """
        import networkx as nx

        g = nx.DiGraph(constant_bytes=self.constant_bytes)
        for operation in self.operations:
            g.add_node(
                operation.name,
                cost=operation.cost_s,
                size=sum(self.values[v].size_bytes for v in operation.outputs),
                workspace=operation.workspace_bytes,
                backward=operation.backward,
                recomputable=operation.recomputable,
                module=operation.module,
                result=any(v in self.results for v in operation.outputs),
            )
        for operation in self.operations:
            for v in operation.inputs:
                source = self.operations[self.producer[v]].name
                if g.has_edge(source, operation.name):
                    g.edges[source, operation.name]["values"].append(self.values[v].name)
                else:
                    g.add_edge(source, operation.name, values=[self.values[v].name])
                if v in operation.overwrites:
                    g.edges[source, operation.name]["overwritten"] = True
        return g

    @classmethod
    def from_networkx(
        cls,
        g: nx.DiGraph,
        order: Iterable[Hashable] | None = None,
        results: Iterable[Hashable] | None = None,
        constant_bytes: int = 0,
    ) -> Graph:
        """Return a graph from a networkx DiGraph: each node is an operation with one output value.

        Node attributes: `cost` (seconds), `size` (bytes), optional `workspace` (bytes), `backward`,
        `recomputable`, `module`, `result`; edges may have `overwritten`. `order` is the execution
        order, by default `networkx.topological_sort(g)`. `results` are the nodes whose outputs are
        retained to the end (default: those with a true `result`); an output without a consumer that
        is no result is live only while its operation runs.

        Raises `GraphError` on a cycle, a missing or bad attribute, or an order that is not one.
        """
        import networkx as nx

        if not isinstance(g, nx.Graph):
            raise wrong_type("from_networkx", "a networkx.DiGraph", g, "trace.graph() is a Graph")
        if not g.is_directed() or g.is_multigraph():
            raise GraphError("expected a networkx.DiGraph; convert with networkx.DiGraph(g)")
        if not nx.is_directed_acyclic_graph(g):
            cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(g))
            raise GraphError(f"the graph has a cycle ({cycle}); a training step has none")
        nodes = list(nx.topological_sort(g)) if order is None else list(order)
        if len(nodes) != len(g) or set(nodes) != set(g.nodes):
            raise GraphError(
                f"`order` names {len(nodes)} operations, the graph has {len(g)}; "
                "it must name each exactly once"
            )
        index = {node: i for i, node in enumerate(nodes)}
        result_nodes = (
            {n for n in nodes if g.nodes[n].get("result", False)}
            if results is None
            else set(results)
        )
        if unknown := result_nodes - set(index):
            raise GraphError(f"`results` names {sorted(map(str, unknown))}, not in the graph")
        operations = tuple(
            _operation_from_node(node, g.nodes[node], index, g.pred[node]) for node in nodes
        )
        values = tuple(
            Value(str(node), _integer_attribute(g.nodes[node], "size", node, required=True))
            for node in nodes
        )
        return cls(
            operations,
            values,
            results=frozenset(index[n] for n in result_nodes),
            constant_bytes=constant_bytes,
        )


def _operation_from_node(
    node: Hashable,
    attributes: Mapping[str, object],
    index: Mapping[Hashable, int],
    edges: Mapping[Hashable, Mapping[str, object]],
) -> Operation:
    cost = attributes.get("cost")
    if isinstance(cost, bool) or not isinstance(cost, (int, float)):
        raise GraphError(f"operation {node!s} needs a number `cost` (seconds), got {cost!r}")
    return Operation(
        name=str(node),
        inputs=tuple(sorted(index[n] for n in edges)),
        outputs=(index[node],),
        overwrites=tuple(sorted(index[n] for n, edge in edges.items() if edge.get("overwritten"))),
        cost_s=float(cost),
        workspace_bytes=_integer_attribute(attributes, "workspace", node),
        backward=bool(attributes.get("backward", False)),
        recomputable=bool(attributes.get("recomputable", True)),
        module=str(attributes.get("module", "")),
    )


def _integer_attribute(
    attributes: Mapping[str, object], key: str, node: Hashable, required: bool = False
) -> int:
    """Return an attribute of a node, 0 if it is missing and not `required`. Raises `GraphError`
    unless it is an integer."""
    number = attributes.get(key, None if required else 0)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise GraphError(f"operation {node!s} needs an integer `{key}` (bytes), got {number!r}")
    return number


_LIMIT_BYTES = 2**62
"""Limit of all sizes together: 64 bits hold any sum, with every value counted twice."""

_LIMIT_S = 1e100
"""Limit of all costs together, and the inverse of the smallest cost that is not zero: no schedule's
time overflows, and no power of a ratio of costs."""


def _check_graph_totals(graph: Graph) -> None:
    """Raise `GraphError` if the sizes or the costs of a graph add up to too much."""
    size_bytes = graph.constant_bytes + sum(value.size_bytes for value in graph.values)
    size_bytes += max((operation.workspace_bytes for operation in graph.operations), default=0)
    if size_bytes >= _LIMIT_BYTES:
        raise GraphError(
            "constant memory, all values and the largest workspace add up to over 2**62 bytes: "
            "sizes are in bytes"
        )
    if graph.unsplit is not None:
        peak_bytes, time_s = graph.unsplit.peak_bytes, graph.unsplit.time_s
        if not 0 <= peak_bytes < _LIMIT_BYTES or not 0 <= time_s < _LIMIT_S:
            raise GraphError(f"a peak of {peak_bytes} bytes and {time_s} s are no unsplit step's")
    costs_s = [operation.cost_s for operation in graph.operations]
    if tiny := [cost for cost in costs_s if 0 < cost < 1 / _LIMIT_S]:
        raise GraphError(f"an operation costs {tiny[0]} s: costs are zero, or {1 / _LIMIT_S:g} s")
    if max(costs_s, default=0.0) >= _LIMIT_S or math.fsum(costs_s) >= _LIMIT_S:
        raise GraphError(f"the costs add up to over {_LIMIT_S:g} s: give them in a larger unit")


def _check_overwrites(graph: Graph, operation: Operation, where: str) -> None:
    over = operation.overwrites
    if len(set(over)) != len(over) or not set(over) <= set(operation.inputs):
        raise GraphError(f"{where} overwrites values {over}; they must be inputs, each once")
    if not graph.results.isdisjoint(over):
        raise GraphError(f"{where} overwrites a result, which is retained to the end")
    sizes_bytes = [
        sum(graph.values[v].size_bytes for v in values) for values in (over, operation.outputs)
    ]
    if sizes_bytes[0] > sizes_bytes[1]:
        raise GraphError(
            f"{where} overwrites {sizes_bytes[0]} bytes; its outputs have {sizes_bytes[1]}"
        )


def _check_renews(operation: Operation, where: str, renewable: set[int]) -> None:
    renews = operation.renews
    if not set(renews) <= renewable or not set(renews) <= set(operation.outputs):
        raise GraphError(
            f"{where} renews values {renews}; they must be among its outputs, produced before by "
            "another operation, not renewed before, and no results"
        )
    if operation.recomputable or not set(renews).isdisjoint(operation.inputs):
        raise GraphError(f"{where} renews values, so it runs only once and does not read them")


def _validate_graph(graph: Graph) -> None:
    count = len(graph.values)
    names: set[str] = set()
    produced: set[int] = set()
    renewed: set[int] = set()
    for value in graph.values:
        if value.size_bytes < 0:
            raise GraphError(
                f"value {value.name} has {value.size_bytes} bytes; sizes are zero or more"
            )
    for index, operation in enumerate(graph.operations):
        where = f"operation {index} ({operation.name})"
        if operation.name in names:
            raise GraphError(f"{where}: another operation has this name; names are unique")
        names.add(operation.name)
        if not math.isfinite(operation.cost_s) or operation.cost_s < 0:
            raise GraphError(
                f"{where} costs {operation.cost_s} s; costs are finite and zero or more"
            )
        if operation.workspace_bytes < 0:
            raise GraphError(f"{where} has a workspace of {operation.workspace_bytes} bytes")
        for v in operation.inputs + operation.outputs:
            if not 0 <= v < count:
                raise GraphError(f"{where} names value {v}; the graph has {count} values")
        if len(set(operation.inputs)) != len(operation.inputs):
            raise GraphError(f"{where} lists an input twice")
        for v in operation.inputs:
            if v not in produced:
                raise GraphError(
                    f"{where} consumes value {graph.values[v].name} before any operation "
                    "produces it: the order is not topological, or there is a cycle"
                )
        if not -1 <= operation.same_copy_as < index:
            raise GraphError(f"{where} needs the copies of an operation that is not before it")
        if operation.renews:
            _check_renews(operation, where, produced - graph.results - renewed)
            renewed.update(operation.renews)
        for v in operation.outputs:
            if v in produced and v not in operation.renews:
                raise GraphError(f"{where} produces value {graph.values[v].name} a second time")
            produced.add(v)
        if operation.overwrites:
            _check_overwrites(graph, operation, where)
    if len(produced) != count:
        missing = next(v for v in range(count) if v not in produced)
        raise GraphError(f"no operation produces value {graph.values[missing].name}")
    for v in graph.results:
        if not 0 <= v < count:
            raise GraphError(f"result {v} is no value; the graph has {count} values")
    if graph.constant_bytes < 0:
        raise GraphError(
            f"constant memory is {graph.constant_bytes} bytes; it must be zero or more"
        )
    if not 0 <= graph.library_bytes <= graph.constant_bytes:
        raise GraphError(
            f"libraries hold {graph.library_bytes} bytes; it must be a part of the "
            f"{graph.constant_bytes} bytes of constant memory"
        )
    if graph.boundary is not None:
        if not 0 <= graph.boundary < len(graph.operations):
            raise GraphError(f"boundary {graph.boundary} is no operation")
        if graph.operations[graph.boundary].recomputable:
            raise GraphError("the boundary operation must have recomputable=False")
    _check_graph_totals(graph)
