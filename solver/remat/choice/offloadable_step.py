"""Steps whose tensors can be offloaded: traces, and what other frontends plan on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from remat.allocator.budget_fitting import uses_expandable_segments
from remat.allocator.prediction import with_prediction
from remat.choice.stays import PlannedStays
from remat.costs.devices import Link
from remat.documents.memory_reuse import reusable_arguments
from remat.documents.targets import ARRIVE_TARGET, OFFLOAD_TARGET, RELEASE_TARGET
from remat.documents.trace import Trace, storages_live_at_end
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.passes.offload.candidates import offloadable_values
from remat.passes.offload.copies_in_graph import offload_values
from remat.passes.offload.copies_in_trace import offload_tensors
from remat.plan import Plan
from remat.progress import Clock
from remat.schedule import Schedule


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

    def graph_with_stays(self, planned: PlannedStays, link: Link) -> Graph:
        """Return the graph of `with_stays`, in less time; values may have other indices."""
        ...

    def with_schedule(self, plan: Plan, schedule: Schedule) -> Plan | None:
        """Return the plan of this step with a schedule whose peak may be larger;
        None if torch's allocator would then exceed the plan's budget."""
        ...

    def with_waits(self, waits_s: Mapping[str, float]) -> Self:
        """Return the step in which operations that wait for copies cost these seconds, by their
        names; those that are missing from `waits_s` cost nothing."""
        ...


_RESERVED_FACTOR = 1.1
"""A schedule that waits less for copies may reserve more by this factor. Budgets limit allocated
memory; with the same reserved memory, a model with 131,072 tokens waited for 22% of its step."""

S = TypeVar("S", bound=OffloadableStep)
S_contra = TypeVar("S_contra", bound=OffloadableStep, contravariant=True)


class FormSolver(Protocol[S_contra]):
    """Solves the forms of a step, such as whole, in pieces, and with tensors offloaded.

    No solve starts after the time limit of all solves, `clock`; a choice ends after
    `choice_limit_s`.
    """

    clock: Clock
    choice_limit_s: float

    def solve(self, step: S_contra, budget: Budget) -> Plan:
        """Return the plan of a form. Raises `InfeasibleBudget` and `SolverTimeout`."""
        ...


class StepPlan(NamedTuple, Generic[S]):
    """A plan and the step that it is for, in which tensors may be offloaded."""

    step: S
    plan: Plan


@dataclass(frozen=True)
class TraceStep:
    """A trace as an `OffloadableStep`."""

    trace: Trace

    def __str__(self) -> str:
        pieces = max((split.pieces for split in self.trace.splits), default=1)
        offloads = sum(node.target == OFFLOAD_TARGET for node in self.trace.nodes)
        return f"in {pieces} pieces, {offloads} tensors offloaded"

    def graph(self) -> Graph:
        """Return the trace's graph."""
        return self.trace.graph()

    def offloadable_values(self, min_bytes: int) -> dict[int, str]:
        """Return the names of the trace's tensors that can be offloaded, by their values."""
        values = self.graph().values
        return {v: n for v, n in self._offloadable.items() if values[v].size_bytes >= min_bytes}

    def with_stays(self, planned: PlannedStays, link: Link) -> TraceStep:
        """Return the trace with tensors offloaded."""
        return TraceStep(offload_tensors(self.trace, planned.stays, link, planned.recomputed_s))

    def graph_with_stays(self, planned: PlannedStays, link: Link) -> Graph:
        """Return the graph of `with_stays`, without its trace."""
        return offload_values(
            self.graph(),
            self._offloadable,
            planned.stays,
            link,
            planned.recomputed_s,
            self._arrival_overwrites,
        ).graph

    def with_schedule(self, plan: Plan, schedule: Schedule) -> Plan | None:
        """Return the plan with another schedule; None if the allocator would then allocate more
        than the requested budget, and more than for the plan, or reserve more than for the plan by
        more than 10%."""
        changed = with_prediction(replace(plan, schedule=schedule), self.trace)
        before, after = plan.allocator, changed.allocator
        if before is None or after is None:  # without a CUDA device
            return changed
        is_expandable = uses_expandable_segments()
        limit_bytes = max(
            plan.requested_budget_bytes, before.allocated(is_expandable=is_expandable)
        )
        reserved_bytes = _RESERVED_FACTOR * before.reserved(is_expandable=is_expandable)
        is_within = (
            after.allocated(is_expandable=is_expandable) <= limit_bytes
            and after.reserved(is_expandable=is_expandable) <= reserved_bytes
        )
        return changed if is_within else None

    def with_waits(self, waits_s: Mapping[str, float]) -> TraceStep:
        """Return the trace with these costs of the operations that wait for copies."""
        nodes = tuple(
            node.model_copy(update={"cost_s": waits_s.get(node.name, 0.0)})
            if node.target in (RELEASE_TARGET, ARRIVE_TARGET)
            else node
            for node in self.trace.nodes
        )
        return TraceStep(self.trace.replace(nodes=nodes))

    @cached_property
    def _offloadable(self) -> dict[int, str]:
        return offloadable_values(self.trace)

    @cached_property
    def _arrival_overwrites(self) -> dict[int, int]:
        """The value that each operation of the graph may write over if it comes back from the
        host."""
        trace, graph = self.trace, self.graph()
        if not trace.reuses_memory:
            return {}
        value_of = {trace.storage_of[value.name]: v for v, value in enumerate(graph.values)}
        storages = {trace.storage_of[name] for name in self._offloadable.values()}
        arguments = reusable_arguments(trace, storages_live_at_end(trace), storages)
        read = {op: arguments.get(o.name) for op, o in enumerate(graph.operations)}
        return {
            op: value_of[storage]
            for op, name in read.items()
            if name is not None and (storage := trace.storage_of[name]) in storages
        }
