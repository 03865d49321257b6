"""Tags on a training step in one fx graph: which forward nodes save their outputs.

A pass of `torch._functorch` reads the tags, and torchtitan's graph trainer has one, too. A forward
node with `meta["recompute"]` of MUST_RECOMPUTE is recomputed once, right before the backward first
needs it, from tensors that are saved or recomputed themselves. Random operations are not
recomputed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.costs.roofline import Roofline, operation_seconds
from remat.costs.trace_costs import MIN_COST_S, OperationCost, with_costs
from remat.documents.trace import Trace
from remat.errors import TraceError
from remat.frontend.capture.reading.trace_builder import OPAQUE_TARGET, TraceBuilder, identifier
from remat.frontend.common.aliases import (
    is_getitem,
    is_view,
    mutated_args,
    producer,
    storage_base,
)
from remat.frontend.compile.fx_utils import (
    is_operation,
    is_recomputable,
    max_size,
    storage_by_schema,
)
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.operation_costs import measure_operations, progress_reporter
from remat.graph import Graph
from remat.limits.limits import INFEASIBLE_ERROR, is_smallest_accepted
from remat.plan import Plan
from remat.solve import solve
from remat.strategies import Selective

logger = logging.getLogger("remat")

_TAG = "recompute"
"""The key of a tag in a node's `meta`."""

_PHASE, _BACKWARD = "phase", "autograd_backward"
"""The keys in a node's `meta` by which torch marks the backward."""


@dataclass
class MemoryPolicy:
    """A graph pass that tags each forward node of a training step as saved or recomputed, with the
    signature of torchtitan's memory policies.

    `budget` limits all memory of the graph, its inputs included. Operations are measured on the
    device of the graph, or estimated by `costs`. With `infeasible="smallest"`, the tags have the
    smallest peak if no tags fit the budget. `plan` is the plan of the last graph.
    """

    budget: int | str
    strategy: Selective | None = None
    costs: Roofline | None = None
    infeasible: str = INFEASIBLE_ERROR
    plan: Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        is_smallest_accepted(self.infeasible)  # raises for an unknown value

    def __call__(self, gm: fx.GraphModule, *, config: object = None) -> fx.GraphModule:
        """Tag a graph, and return it.

        `gm` is a graph of forward, loss and backward whose nodes have fake values (`meta["val"]`).
        Backward nodes are marked by torch with `meta["autograd_backward"]`, or with
        `meta["custom"]["phase"] == "backward"`.

        Raises `TraceError` if no node is marked as backward, `InfeasibleBudget` if no tags fit.
        """
        trace, first_backward = _read_marked_step(gm)
        graph = _without_boundary(_with_operation_costs(trace, self.costs).graph())
        strategy = self.strategy or Selective()
        self.plan = solve(graph, self.budget, strategy, infeasible=self.infeasible)
        recomputed = {graph.operations[op].name for op in self.plan.schedule.recomputed(graph)}
        for node in gm.graph.nodes:
            if node is first_backward:
                break
            if node.op == "call_function":  # an operation with its views and results
                is_recomputed = identifier(producer(node).name) in recomputed
                node.meta[_TAG] = (
                    CheckpointPolicy.MUST_RECOMPUTE if is_recomputed else CheckpointPolicy.MUST_SAVE
                )
        logger.info("tagged the nodes of a training step:\n%s", self.plan)
        return gm


def _read_marked_step(gm: fx.GraphModule) -> tuple[Trace, fx.Node]:
    """Return a training step, whose backward nodes are marked, as a trace, and the first operation
    of its backward. An operation is recomputable if no operation writes to its inputs or results in
    place. Raises `TraceError` if no operation is before or in the backward."""
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
    start = is_backward.index(True)
    operations = list(filter(is_operation, nodes))
    first_backward = next(filter(is_operation, nodes[start:]), None)
    if first_backward is None or first_backward is operations[0]:
        raise TraceError("this graph has no operation before its backward, or none in it")
    mutated = {storage_base(argument) for node in operations for argument in mutated_args(node)}
    builder = TraceBuilder(value_of=max_size, storage_of=storage_by_schema, allows_opaque=True)
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            builder.read_input(node, value, kind="input", target=str(len(builder.placeholders)))
        elif is_operation(node) or (is_view(node) and not is_getitem(node)):
            results = (node, *filter(is_getitem, node.users))
            touched = {storage_base(n) for n in (*results, *node.all_input_nodes)}
            record = builder.read_call(
                node,
                returns=not mutated_args(node),
                backward=index >= start,
                recomputable=is_recomputable(node) and mutated.isdisjoint(touched),
            )
            builder.nodes.append(record)
    returned = [
        n
        for n in gm.graph.output_node().all_input_nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    forward = set(nodes[:start])
    outputs = [node for node in returned if node in forward]
    return builder.step(outputs, [n for n in returned if n not in forward]), first_backward


def _without_boundary(graph: Graph) -> Graph:
    """Return the graph without its boundary: the forward and the backward are one fx graph."""
    runs = (op for index, op in enumerate(graph.operations) if index != graph.boundary)
    return replace(graph, operations=tuple(runs), boundary=None)


def _is_backward_phase(node: fx.Node) -> bool:
    """True if a node is annotated with the phase "backward"."""
    return node.meta.get("custom", {}).get(_PHASE) == "backward"


def _with_operation_costs(trace: Trace, costs: Roofline | None) -> Trace:
    """Return the trace with the seconds of each operation, measured if `costs` is None, else
    estimated by that roofline. An operation that cannot be written as data costs next to
    nothing."""
    operations = [node for node in trace.operations if node is not None]
    described = [node for node in operations if node.target != OPAQUE_TARGET]
    if costs is not None:
        seconds = {n.name: operation_seconds(n, trace.tensors, costs) for n in described}
    else:
        device = torch.device(trace.device)
        with progress_reporter(None) as report:  # the compiler reports its own progress
            measured = measure_operations(
                described,
                trace.tensors,
                device,
                CostCache(),
                report,
                trace_device_type=device.type,
            )
        seconds = {name: cost.cost_s for name, cost in measured.items()}
    return with_costs(
        trace,
        {
            node.name: OperationCost(max(MIN_COST_S, seconds.get(node.name, 0.0)), 0, "")
            for node in operations
        },
    )
