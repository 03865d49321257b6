"""Steps whose tensors can be offloaded: traces, and what other frontends plan on. And stays on the
host, from a solution of the relaxation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from remat.allocator.budget_fitting import uses_expandable_segments
from remat.allocator.prediction import with_prediction
from remat.choice.candidate_log import CandidateLog
from remat.costs.devices import Link
from remat.documents.targets import ARRIVE_TARGET, OFFLOAD_TARGET, RELEASE_TARGET
from remat.documents.trace import Trace, reusable_arguments, storages_live_at_end
from remat.graph import Graph
from remat.milp.checkpoint_cuts import OffloadCut
from remat.passes.offload.candidates import offloadable_values
from remat.passes.offload.copies_in_graph import HostStay, offload_values
from remat.passes.offload.copies_in_trace import offload_tensors
from remat.plan import Plan
from remat.progress import Clock
from remat.schedule import Schedule


class PlannedStays(NamedTuple):
    """Stays on the host, and the seconds of recomputation that are expected before operations."""

    stays: tuple[HostStay, ...]
    recomputed_s: dict[str, float]


class OffloadableStep(Protocol):
    """A measured step whose tensors can be offloaded. It never changes: other forms of it are new
    objects."""

    def graph(self) -> Graph:
        """Return the graph that the solver plans on."""
        ...

    def offloadable_values(self, min_bytes: int) -> list[int]:
        """Return the values of the graph of at least `min_bytes` that can be offloaded."""
        ...

    def with_stays(self, planned: PlannedStays, link: Link) -> Self:
        """Return the step with tensors offloaded as planned."""
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


AS_IT_IS = "as it is"
"""The name of the form of a step that nothing changes."""

_RESERVED_FACTOR = 1.1
"""A schedule that waits less for copies may reserve more by this factor. Budgets limit allocated
memory; with the same reserved memory, a model with 131,072 tokens waited for 22% of its step."""

S = TypeVar("S", bound=OffloadableStep)
S_contra = TypeVar("S_contra", bound=OffloadableStep, contravariant=True)


class FormSolver(Protocol[S_contra]):
    """Solves the forms of a step, such as whole, in pieces, and with tensors offloaded.

    No solve starts after the time limit of all solves, `clock`; a choice ends after
    `choice_limit_s`. `log` has the results of all forms.
    """

    log: CandidateLog
    clock: Clock
    choice_limit_s: float

    def solve(self, step: S_contra, budget_bytes: int | None) -> Plan:
        """Return the plan of a form within a budget, or with the smallest peak if that is None.
        Raises `InfeasibleBudget` and `SolverTimeout`."""
        ...


class StepPlan(NamedTuple, Generic[S]):
    """A plan and the step that it is for, in which tensors may be offloaded."""

    step: S
    plan: Plan


@dataclass(frozen=True)
class TraceStep:
    """A trace as an `OffloadableStep`. `name` says what makes this form of the step, where its
    splits do not."""

    trace: Trace
    name: str = ""

    def __str__(self) -> str:
        name = self.name or (AS_IT_IS if self.pieces == 1 else f"in {self.pieces} pieces")
        offloads = sum(node.target == OFFLOAD_TARGET for node in self.trace.nodes)
        return f"{name}, {offloads} tensors offloaded" if offloads else name

    @property
    def pieces(self) -> int:
        """The largest number of pieces that an operation is split into; 1 without splits."""
        return max((split.pieces for split in self.trace.splits), default=1)

    def graph(self) -> Graph:
        """Return the trace's graph."""
        return self.trace.graph()

    def offloadable_values(self, min_bytes: int) -> list[int]:
        """Return the values of the trace's graph of at least `min_bytes` that can be offloaded."""
        values = self.graph().values
        return [v for v in self._offloadable if values[v].size_bytes >= min_bytes]

    def with_stays(self, planned: PlannedStays, link: Link) -> TraceStep:
        """Return the trace with tensors offloaded as planned."""
        offloaded = offload_tensors(self.trace, planned.stays, link, planned.recomputed_s)
        return replace(self, trace=offloaded)

    def graph_with_stays(self, planned: PlannedStays, link: Link) -> Graph:
        """Return the graph of `with_stays`, without its trace."""
        return offload_values(
            self.graph(),
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
        """Return the trace in which operations that wait for copies cost these seconds, by their
        names; 0 if they are missing from `waits_s`."""
        nodes = tuple(
            node.model_copy(update={"cost_s": waits_s.get(node.name, 0.0)})
            if node.target in (RELEASE_TARGET, ARRIVE_TARGET)
            else node
            for node in self.trace.nodes
        )
        return replace(self, trace=self.trace.replace(nodes=nodes))

    @cached_property
    def _offloadable(self) -> list[int]:
        return offloadable_values(self.trace)

    @cached_property
    def _arrival_overwrites(self) -> dict[int, int]:
        """By operation of the graph, the value that it may write over once that has come back from
        the host. Empty if the trace reuses no memory."""
        trace, graph = self.trace, self.graph()
        if not trace.reuses_memory:
            return {}
        value_of = {trace.storage_of[value.name]: v for v, value in enumerate(graph.values)}
        storages = {trace.storage_of[graph.values[v].name] for v in self._offloadable}
        arguments = reusable_arguments(trace, storages_live_at_end(trace), storages)
        read = {op: arguments.get(o.name) for op, o in enumerate(graph.operations)}
        return {
            op: value_of[storage]
            for op, name in read.items()
            if name is not None and (storage := trace.storage_of[name]) in storages
        }


def stays_of_cut(graph: Graph, cut: OffloadCut, budget_bytes: int) -> PlannedStays:
    """Return the stays of the values that the cut's solution offloads.

    A tensor has left the device by the cut, or earlier where the memory before would exceed the
    budget. It is back before the first operation that reads it, or for which an operation that
    reads it is recomputed. Values that nothing reads after the cut are left out.
    """
    needed_by = _needs_of_recomputed(graph, cut)
    gone_by = _departures_from_device(graph, cut, budget_bytes)
    stays: list[HostStay] = []
    for value in sorted(cut.offloaded):
        needed = _first_need_of_value(graph, cut, value, needed_by)
        if needed < math.inf:
            places = (gone_by[value], cut.operation, int(needed))
            stays.append(HostStay(value, *(skip_boundary(graph, op) for op in places)))
    recomputed_s: dict[str, float] = {}
    for op, needed in needed_by.items():
        if needed < math.inf:
            name = graph.operations[skip_boundary(graph, int(needed))].name
            recomputed_s[name] = recomputed_s.get(name, 0.0) + graph.operations[op].cost_s
    return PlannedStays(tuple(stays), recomputed_s)


def _departures_from_device(graph: Graph, cut: OffloadCut, budget_bytes: int) -> dict[int, int]:
    """Return, for each offloaded value, the operation before which it has to be gone: the cut, or
    an earlier one that does not fit the budget otherwise. Values leave in the order in which they
    are produced. Values that are not offloaded are freed after their last reader before the cut,
    unless they are live at the cut."""
    size = [value.size_bytes for value in graph.values]
    staying = graph.results | cut.retained
    last_reader = {
        v: max((op for op in graph.consumers[v] if op < cut.operation), default=graph.producer[v])
        for v in range(len(graph.values))
        if graph.producer[v] < cut.operation
    }
    freed: list[list[int]] = [[] for _ in range(cut.operation)]
    for v, op in last_reader.items():
        if v not in staying and v not in cut.offloaded:
            freed[op].append(v)
    gone_by = dict.fromkeys(cut.offloaded, cut.operation)
    queue = deque(sorted(cut.offloaded, key=lambda v: graph.producer[v]))
    live_bytes = graph.constant_bytes
    for op in range(cut.operation):
        needed_bytes = live_bytes + graph.min_produced_bytes[op]
        while needed_bytes > budget_bytes and queue and last_reader[queue[0]] < op:
            value = queue.popleft()
            gone_by[value] = op
            needed_bytes -= size[value]
            live_bytes -= size[value]
        live_bytes += sum(size[v] for v in graph.operations[op].outputs)
        live_bytes -= sum(size[v] for v in freed[op])
    return gone_by


def _needs_of_recomputed(graph: Graph, cut: OffloadCut) -> dict[int, float]:
    """Return, for each operation that is recomputed after the cut, the first operation that needs
    it; infinity if none does."""
    needed_by: dict[int, float] = {}
    available = cut.offloaded | cut.retained
    for op in sorted(cut.recomputed, reverse=True):
        needed_by[op] = min(
            (
                _first_need_of_value(graph, cut, value, needed_by)
                for value in graph.operations[op].outputs
                if value not in available
            ),
            default=math.inf,
        )
    return needed_by


def _first_need_of_value(
    graph: Graph, cut: OffloadCut, value: int, needed_by: dict[int, float]
) -> float:
    """Return the first operation from the cut on that needs a value, directly or for a
    recomputation; infinity if none does. `needed_by` has the first needs of recomputed
    operations."""
    direct = (op for op in graph.consumers[value] if op >= cut.operation)
    indirect = (needed_by[op] for op in graph.consumers[value] if op in needed_by)
    return min(min(direct, default=math.inf), min(indirect, default=math.inf))


def skip_boundary(graph: Graph, op: int) -> int:
    """Return an operation or, for the boundary, at which no copy starts or ends, the next one."""
    return op + (op == graph.boundary)
