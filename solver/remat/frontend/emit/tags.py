"""Tags on a training step in one fx graph: what its forward's nodes save for the backward.

`torch._functorch` has a pass that reads them, and so has torchtitan's graph trainer: a forward node
with `meta["recompute"]` of MUST_RECOMPUTE runs again right before the backward first needs it, from
what was saved or ran again itself, and once. What is random never does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.costs.pricing import FLOOR_S
from remat.costs.roofline import Roofline, seconds_of
from remat.documents.records import Node, TensorMeta
from remat.errors import TraceError
from remat.frontend.compile.joint.fx_utils import (
    changes,
    is_item,
    is_view,
    is_work,
    may_run_again,
    source,
    storage_bytes,
    tensors,
)
from remat.frontend.compile.kernels.cost_model import record_of
from remat.frontend.costs.cache import CostCache
from remat.frontend.costs.operations import measure_operations
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.solve import solve
from remat.strategies import Selective

logger = logging.getLogger("remat")

_PHASE, _BACKWARD = "phase", "autograd_backward"
_KEY = "recompute"


def tag(
    gm: fx.GraphModule,
    budget: int | str,
    *,
    strategy: Selective | None = None,
    costs: Roofline | None = None,
    cache: CostCache | None = None,
) -> Plan:
    """Tag the forward nodes of a step with what is saved and what runs again, within `budget`, of
    all that is allocated in the graph, its inputs included. The plan is what the tags mean.

    `gm` is a graph of forward, loss and backward whose nodes have fake values (`meta["val"]`);
    those of the backward are marked as torch marks them, by `meta["autograd_backward"]` or by
    `meta["custom"]["phase"] == "backward"`. Operations are timed on the device of the graph, or
    priced by a `Roofline`.

    Raises `TraceError` where no backward is marked, `InfeasibleBudget` where no tags fit.
    """
    calls, begin = _calls(gm)
    step = _Step(gm, calls, begin)
    graph = step.graph(_seconds(calls, begin, costs, cache))
    plan = solve(graph, budget, strategy or Selective())
    again = {calls[op] for op, runs in Counter(plan.schedule.runs).items() if runs > 1}
    _write(gm, again, calls[begin])
    return plan


class MemoryPolicy:
    """`tag` as a pass over graphs, in the form that torchtitan has for it."""

    def __init__(
        self, budget: int | str, strategy: Selective | None = None, costs: Roofline | None = None
    ) -> None:
        self.budget, self.strategy, self.costs = budget, strategy, costs
        self.plan: Plan | None = None

    def __call__(self, gm: fx.GraphModule, *, config: object = None) -> fx.GraphModule:
        """The same graph, with tags. Raises as `tag`."""
        self.plan = tag(gm, self.budget, strategy=self.strategy, costs=self.costs)
        logger.info("tagged a step:\n%s", self.plan)
        return gm


def _calls(gm: fx.GraphModule) -> tuple[list[fx.Node], int]:
    """The operations that run, and the first of the backward among them."""
    nodes = list(gm.graph.nodes)
    by_phase = any(_phase(node) for node in nodes)
    marked = [_phase(n) if by_phase else bool(n.meta.get(_BACKWARD)) for n in nodes]
    if True not in marked:
        raise TraceError(
            "no node of this graph is marked as of the backward, by meta['autograd_backward'] or "
            "meta['custom']['phase']: trace forward, loss and backward into one graph"
        )
    first = marked.index(True)
    calls = [node for node in nodes if is_work(node)]
    begin = sum(is_work(node) for node in nodes[:first])
    if begin == 0 or begin == len(calls):
        raise TraceError("this graph has nothing before its backward, or nothing in it")
    return calls, begin


def _phase(node: fx.Node) -> bool:
    return node.meta.get("custom", {}).get(_PHASE) == "backward"


class _Step:
    """Storages by number: one for each tensor that an operation makes."""

    def __init__(self, gm: fx.GraphModule, calls: Sequence[fx.Node], begin: int) -> None:
        self._calls, self._begin = calls, begin
        self._output = next(node for node in gm.graph.nodes if node.op == "output")
        self._sizes: list[int] = []
        self._of: dict[fx.Node, tuple[int, ...]] = {}
        given = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
        self._constant_bytes = sum(storage_bytes(t) for n in given for t in tensors(n))
        for node in calls:
            made = [storage_bytes(tensor) for tensor in tensors(node)]
            self._of[node] = tuple(range(len(self._sizes), len(self._sizes) + len(made)))
            self._sizes += made
        self._mutated = {v for node in calls for n in changes(node) for v in self._behind(n)}
        self._written = {source(n) for node in calls for n in changes(node)}

    def _behind(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that a node shows: none for what was given."""
        node = source(node)
        if is_item(node):
            parent = node.args[0]
            assert isinstance(parent, fx.Node)
            whole = self._of.get(parent, ())
            number = node.args[1]
            return whole[number : number + 1] if isinstance(number, int) else whole
        return self._of.get(node, ())

    def graph(self, costs_s: Sequence[float]) -> Graph:
        """As the solver sees it."""
        operations = [
            Operation(
                name=node.name,
                inputs=tuple(sorted({v for n in node.all_input_nodes for v in self._behind(n)})),
                outputs=self._of[node],
                cost_s=cost_s,
                backward=number >= self._begin,
                recomputable=number < self._begin and self._runs_again(node),
            )
            for number, (node, cost_s) in enumerate(zip(self._calls, costs_s, strict=True))
        ]
        names = [f"{node.name}.{i}" for node in self._calls for i in range(len(self._of[node]))]
        values = tuple(map(Value, names, self._sizes))
        held = {v for node in self._output.all_input_nodes for v in self._behind(node)}
        return Graph(tuple(operations), values, frozenset(held), self._constant_bytes)

    def _runs_again(self, node: fx.Node) -> bool:
        """The same from the same: nothing that it reads or makes is written to."""
        if not may_run_again(node) or not self._mutated.isdisjoint(self._of[node]):
            return False
        return self._written.isdisjoint(map(source, node.all_input_nodes))


def _seconds(
    calls: Sequence[fx.Node], begin: int, costs: Roofline | None, cache: CostCache | None
) -> list[float]:
    metas: dict[str, TensorMeta] = {}
    records: dict[fx.Node, Node] = {}
    for number, node in enumerate(calls):
        try:
            records[node] = record_of(node, metas, backward=number >= begin)
        except (TraceError, ValueError):
            continue  # an argument that is no data: counted as nothing
    if costs is not None:
        found = {n: seconds_of(record, metas, costs) for n, record in records.items()}
    else:
        device = max(
            (torch.device(m.device) for m in metas.values()), key=lambda d: d.type != "cpu"
        )
        priced = measure_operations(
            list(records.values()), metas, device, cache or CostCache(), _silent, home=device.type
        )
        found = {n: priced[record.name].cost_s for n, record in records.items()}
    return [max(FLOOR_S, found.get(node, 0.0)) for node in calls]


def _silent(done: int, total: int, name: str) -> None:
    """The graph is compiled meanwhile, which says enough."""


def _write(gm: fx.GraphModule, again: set[fx.Node], first: fx.Node) -> None:
    for node in gm.graph.nodes:
        if node is first:
            return
        if node.op != "call_function":
            continue
        maker = node
        while is_view(maker) or is_item(maker):
            parent = maker.args[0]
            assert isinstance(parent, fx.Node)
            maker = parent
        runs = maker in again
        node.meta[_KEY] = CheckpointPolicy.MUST_RECOMPUTE if runs else CheckpointPolicy.MUST_SAVE
