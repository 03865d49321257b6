"""Offloading in the graph of a compiled step: which tensors can be, and where their copies are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from remat.choice.stays import PlannedStays
from remat.costs.devices import Link
from remat.frontend.compile.joint.fx_utils import (
    is_extern_convolution,
)
from remat.frontend.compile.kernels.fusion_groups import FusionGroup
from remat.frontend.compile.kernels.to_solver import CompileProblem, TensorCopy
from remat.graph import Graph
from remat.passes.offload.copies_in_graph import CopyOperation, OffloadedGraph, offload_values
from remat.plan import Plan
from remat.schedule import Schedule


@dataclass(frozen=True)
class OffloadableProblem:
    """The problem of a compiled step as an `OffloadableStep`: its values are the tensors that
    kernels write."""

    problem: CompileProblem

    def graph(self) -> Graph:
        """Return the problem's graph."""
        return self.problem.graph

    def offloadable_values(self, min_bytes: int) -> dict[int, str]:
        """Return the names of the tensors of at least `min_bytes` that the forward computes and
        does not return."""
        problem = self.problem
        graph, joint = problem.graph, problem.joint
        if graph.boundary is None:
            return {}
        names: dict[int, str] = {}
        for operation, group in zip(graph.operations, problem.groups, strict=True):
            if not isinstance(group, FusionGroup) or operation.backward:
                continue
            for value, node in zip(operation.outputs, group.written, strict=True):
                if (
                    graph.values[value].size_bytes >= min_bytes
                    and value not in graph.results
                    and node not in joint.computed_outputs
                    and node not in joint.mutated
                    and self._fills_storage(node)
                ):
                    names[value] = graph.values[value].name
        return names

    def _fills_storage(self, node: fx.Node) -> bool:
        """True if a node is a tensor of constant size that fills its storage, in strides that are
        known in advance. Those of a convolution are, if torch.compile saves it, too."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return False
        layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if any(not isinstance(number, int) for number in layout) or tensor.storage_offset():
            return False
        joint = self.problem.joint
        strides = joint.strides_in_memory(node)
        is_saved = bool(joint.probe_results) and node.name in joint.probe_results[0].output_strides
        if joint.probe_results and not is_saved and is_extern_convolution(node):
            return False
        written = tensor.as_strided(tensor.shape, strides)
        return bool(torch.ops.aten.is_non_overlapping_and_dense(written))

    def with_stays(self, planned: PlannedStays, link: Link) -> OffloadableProblem:
        """Return the problem with tensors offloaded."""
        problem = self.problem
        offloaded = self._offloaded_graph(planned, link)
        groups = tuple(
            TensorCopy(source.kind, self._node_of(source.value))
            if isinstance(source, CopyOperation)
            else problem.groups[source]
            for source in offloaded.sources
        )
        return OffloadableProblem(replace(problem, graph=offloaded.graph, groups=groups))

    def graph_with_stays(self, planned: PlannedStays, link: Link) -> Graph:
        """Return the graph of `with_stays`."""
        return self._offloaded_graph(planned, link).graph

    def _offloaded_graph(self, planned: PlannedStays, link: Link) -> OffloadedGraph:
        graph, values = self.problem.graph, self.offloadable_values(0)
        return offload_values(graph, values, planned.stays, link, planned.recomputed_s)

    def _node_of(self, value: int) -> fx.Node:
        graph = self.problem.graph
        producer = graph.producer[value]
        group = self.problem.groups[producer]
        assert isinstance(group, FusionGroup)
        return group.written[graph.operations[producer].outputs.index(value)]

    def with_schedule(self, plan: Plan, schedule: Schedule) -> Plan:
        """Return the plan with another schedule. The allocator's peak is compared with the budget
        once the code is there."""
        return replace(plan, schedule=schedule)

    def with_waits(self, waits_s: Mapping[str, float]) -> OffloadableProblem:
        """Return the problem with these costs of the operations that wait for copies."""
        pairs = zip(self.problem.graph.operations, self.problem.groups, strict=True)
        operations = tuple(
            replace(operation, cost_s=waits_s.get(operation.name, 0.0))
            if isinstance(group, TensorCopy) and group.waits
            else operation
            for operation, group in pairs
        )
        graph = replace(self.problem.graph, operations=operations)
        return OffloadableProblem(replace(self.problem, graph=graph))
