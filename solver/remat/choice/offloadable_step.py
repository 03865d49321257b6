"""Steps whose tensors can be offloaded: traces, and what other frontends plan on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from remat.choice.stays import PlannedStays, values_of_candidates
from remat.costs.link import Link
from remat.documents.targets import ARRIVE_TARGET, RELEASE_TARGET
from remat.documents.trace import Trace
from remat.graph import Graph
from remat.passes.offload.candidates import offload_candidates
from remat.passes.offload.rewriting import offload_tensors
from remat.plan import Plan


class OffloadableStep(Protocol):
    """A measured step whose tensors can be offloaded. It never changes: other forms of it are new
    objects."""

    def graph(self) -> Graph:
        """Return the graph that the solver plans on."""
        ...

    def offloadable_values(self, min_bytes: int) -> dict[int, str]:
        """Return the names of the tensors of at least `min_bytes` that can be offloaded, by their
        values in the graph."""
        ...

    def with_stays(self, planned: PlannedStays, link: Link) -> Self:
        """Return the step with tensors offloaded."""
        ...

    def with_waits(self, waits_s: Mapping[str, float]) -> Self:
        """Return the step in which operations that wait for copies cost these seconds, by their
        names; those that are missing from `waits_s` cost nothing."""
        ...


S = TypeVar("S", bound=OffloadableStep)


class StepPlan(NamedTuple, Generic[S]):
    """A plan and the step that it is for, in which tensors may be offloaded."""

    step: S
    plan: Plan


@dataclass(frozen=True, slots=True)
class TraceStep:
    """A trace as an `OffloadableStep`."""

    trace: Trace

    def graph(self) -> Graph:
        """Return the trace's graph."""
        return self.trace.graph()

    def offloadable_values(self, min_bytes: int) -> dict[int, str]:
        """Return the names of the trace's candidates, by their values."""
        return values_of_candidates(self.graph(), offload_candidates(self.trace), min_bytes)

    def with_stays(self, planned: PlannedStays, link: Link) -> TraceStep:
        """Return the trace with tensors offloaded."""
        return TraceStep(offload_tensors(self.trace, planned.stays, link, planned.recomputed_s))

    def with_waits(self, waits_s: Mapping[str, float]) -> TraceStep:
        """Return the trace with these costs of the operations that wait for copies."""
        nodes = tuple(
            node.model_copy(update={"cost_s": waits_s.get(node.name, 0.0)})
            if node.target in (RELEASE_TARGET, ARRIVE_TARGET)
            else node
            for node in self.trace.nodes
        )
        return TraceStep(self.trace.replace(nodes=nodes))
