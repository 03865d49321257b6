"""Tags on a training step in one fx graph: which forward nodes save their outputs.

A pass of `torch._functorch` reads the tags, and torchtitan's graph trainer has one, too. A forward
node with `meta["recompute"]` of MUST_RECOMPUTE is recomputed once, right before the backward first
needs it, from tensors that are saved or recomputed themselves. Random operations are not
recomputed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.costs.roofline import Roofline, operation_seconds
from remat.costs.trace_costs import MIN_COST_S
from remat.documents.records import Node
from remat.errors import TraceError
from remat.frontend.capture.reading.trace_builder import TraceBuilder
from remat.frontend.common.aliases import is_getitem, mutated_args, producer, storage_base
from remat.frontend.compile.fx_utils import (
    is_operation,
    is_recomputable,
    max_size,
    output_tensors,
    storage_by_schema,
    storage_bytes,
)
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.operation_costs import measure_operations
from remat.graph import Graph, Operation, Value
from remat.limits.infeasible import INFEASIBLE_ERROR, is_smallest_accepted
from remat.plan import Plan
from remat.solve import solve
from remat.strategies import Selective

logger = logging.getLogger("remat")

_TAG = "recompute"
"""The key of a tag in a node's `meta`."""

_PHASE, _BACKWARD = "phase", "autograd_backward"
"""The keys in a node's `meta` by which torch marks the backward."""


def tag(
    gm: fx.GraphModule,
    budget: int | str,
    *,
    strategy: Selective | None = None,
    costs: Roofline | None = None,
    cache: CostCache | None = None,
    infeasible: str = INFEASIBLE_ERROR,
) -> Plan:
    """Tag each forward node of a training step as saved or recomputed, and return the plan that the
    tags mean. `budget` limits all memory of the graph, its inputs included.

    `gm` is a graph of forward, loss and backward whose nodes have fake values (`meta["val"]`).
    Backward nodes are marked by torch with `meta["autograd_backward"]`, or with
    `meta["custom"]["phase"] == "backward"`. Operations are measured on the device of the graph,
    or estimated by a `Roofline`.

    With `infeasible="smallest"`, the tags have the smallest peak if no tags fit the budget.

    Raises `TraceError` if no node is marked as backward, `InfeasibleBudget` if no tags fit.
    """
    operations, num_forward = _find_operations(gm)
    step = _TaggedStep(gm, operations, num_forward)
    graph = step.solver_graph(_operation_costs_s(operations, num_forward, costs, cache))
    plan = solve(graph, budget, strategy or Selective(), infeasible=infeasible)
    run_counts = Counter(plan.schedule.runs)
    recomputed = {operations[op] for op, count in run_counts.items() if count > 1}
    _set_tags(gm, recomputed, operations[num_forward])
    return plan


class MemoryPolicy:
    """A graph pass that calls `tag`, with the signature of torchtitan's memory policies."""

    def __init__(
        self,
        budget: int | str,
        strategy: Selective | None = None,
        costs: Roofline | None = None,
        infeasible: str = INFEASIBLE_ERROR,
    ) -> None:
        is_smallest_accepted(infeasible)  # raises for an unknown value
        self.budget, self.strategy, self.costs = budget, strategy, costs
        self.infeasible = infeasible
        self.plan: Plan | None = None
        """The plan of the last graph."""

    def __call__(self, gm: fx.GraphModule, *, config: object = None) -> fx.GraphModule:
        """Tag the graph, and return it. Raises the errors of `tag`."""
        self.plan = tag(
            gm,
            self.budget,
            strategy=self.strategy,
            costs=self.costs,
            infeasible=self.infeasible,
        )
        logger.info("tagged the nodes of a training step:\n%s", self.plan)
        return gm


def _find_operations(gm: fx.GraphModule) -> tuple[list[fx.Node], int]:
    """Return the operations of the graph in execution order, and how many are of the forward."""
    nodes = list(gm.graph.nodes)
    has_phases = any(_is_backward_phase(node) for node in nodes)
    is_backward = [
        _is_backward_phase(node) if has_phases else bool(node.meta.get(_BACKWARD)) for node in nodes
    ]
    if True not in is_backward:
        raise TraceError(
            "no node of this graph is marked as backward, by meta['autograd_backward'] or "
            "meta['custom']['phase']: trace forward, loss and backward into one graph"
        )
    first_backward = is_backward.index(True)
    operations = [node for node in nodes if is_operation(node)]
    num_forward = sum(is_operation(node) for node in nodes[:first_backward])
    if num_forward == 0 or num_forward == len(operations):
        raise TraceError("this graph has no operation before its backward, or none in it")
    return operations, num_forward


def _is_backward_phase(node: fx.Node) -> bool:
    """True if a node is annotated with the phase "backward"."""
    return node.meta.get("custom", {}).get(_PHASE) == "backward"


class _TaggedStep:
    """A training step as storages and the operations on them. Each tensor that an operation outputs
    has a storage; storages are numbered in this order, as the solver's values."""

    def __init__(self, gm: fx.GraphModule, operations: Sequence[fx.Node], num_forward: int) -> None:
        self._operations, self._num_forward = operations, num_forward
        self._output = next(node for node in gm.graph.nodes if node.op == "output")
        self._sizes_bytes: list[int] = []
        self._output_storages: dict[fx.Node, tuple[int, ...]] = {}
        inputs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
        self._constant_bytes = sum(storage_bytes(t) for n in inputs for t in output_tensors(n))
        for node in operations:
            sizes_bytes = [storage_bytes(tensor) for tensor in output_tensors(node)]
            start = len(self._sizes_bytes)
            self._output_storages[node] = tuple(range(start, start + len(sizes_bytes)))
            self._sizes_bytes += sizes_bytes
        mutated = [argument for node in operations for argument in mutated_args(node)]
        self._mutated_storages = {v for n in mutated for v in self._storages_of(n)}
        self._mutated_bases = {storage_base(n) for n in mutated}

    def _storages_of(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storages of a node, which may be a view; none for inputs of the graph."""
        node = storage_base(node)
        storages = self._output_storages.get(producer(node), ())
        if is_getitem(node):
            position = node.args[1]
            return storages[position : position + 1] if isinstance(position, int) else storages
        return storages

    def solver_graph(self, costs_s: Sequence[float]) -> Graph:
        """Return the step as a graph for the solver, with the cost of each operation."""
        operations = [
            Operation(
                name=node.name,
                inputs=tuple(
                    sorted({v for n in node.all_input_nodes for v in self._storages_of(n)})
                ),
                outputs=self._output_storages[node],
                cost_s=cost_s,
                backward=index >= self._num_forward,
                recomputable=index < self._num_forward and self._may_be_recomputed(node),
            )
            for index, (node, cost_s) in enumerate(zip(self._operations, costs_s, strict=True))
        ]
        names = [
            f"{node.name}.{position}"
            for node in self._operations
            for position in range(len(self._output_storages[node]))
        ]
        values = tuple(map(Value, names, self._sizes_bytes))
        results = {v for node in self._output.all_input_nodes for v in self._storages_of(node)}
        return Graph(tuple(operations), values, frozenset(results), self._constant_bytes)

    def _may_be_recomputed(self, node: fx.Node) -> bool:
        """True if a recomputation gives the same result: no operation writes to the inputs or
        outputs in place."""
        storages = self._output_storages[node]
        if not is_recomputable(node) or not self._mutated_storages.isdisjoint(storages):
            return False
        return self._mutated_bases.isdisjoint(map(storage_base, node.all_input_nodes))


def _operation_costs_s(
    operations: Sequence[fx.Node],
    num_forward: int,
    costs: Roofline | None,
    cache: CostCache | None,
) -> list[float]:
    """Return the seconds of each operation, measured or estimated by a roofline. An operation that
    cannot be written as data costs nothing."""
    reader = TraceBuilder(value_of=max_size, storage_of=storage_by_schema)
    records: dict[fx.Node, Node] = {}
    for index, node in enumerate(operations):
        with suppress(TraceError, ValueError):
            records[node] = reader.read_call(node, backward=index >= num_forward)
    metas = reader.meta_by_name
    if costs is not None:
        seconds = {n: operation_seconds(record, metas, costs) for n, record in records.items()}
    else:
        device = max(
            (torch.device(m.device) for m in metas.values()), key=lambda d: d.type != "cpu"
        )
        measured = measure_operations(
            list(records.values()),
            metas,
            device,
            cache or CostCache(),
            _no_progress,
            trace_device_type=device.type,
        )
        seconds = {n: measured[record.name].cost_s for n, record in records.items()}
    return [max(MIN_COST_S, seconds.get(node, 0.0)) for node in operations]


def _no_progress(measured: int, total: int, name: str) -> None:
    """Report no progress: the compiler that calls the pass reports its own."""


def _set_tags(gm: fx.GraphModule, recomputed: set[fx.Node], first_backward: fx.Node) -> None:
    """Tag the forward nodes: recomputed operations with their views and results, and saved ones."""
    for node in gm.graph.nodes:
        if node is first_backward:
            return
        if node.op != "call_function":
            continue
        is_recomputed = producer(node) in recomputed
        node.meta[_TAG] = (
            CheckpointPolicy.MUST_RECOMPUTE if is_recomputed else CheckpointPolicy.MUST_SAVE
        )
