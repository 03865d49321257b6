"""A step with offloaded tensors, bounds that judge it, and the programs that choose the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic

from remat.choice.offloadable_step import OffloadableStep, PlannedStays, S, skip_boundary
from remat.costs.devices import Link
from remat.graph import Graph
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.milp.checkpoint_cuts import (
    HostLimits,
    OffloadCut,
    candidate_cuts,
    linear_bound_s,
    relax_offload_cut,
)
from remat.passes.offload.candidates import idle_spans
from remat.passes.offload.copies import copy_times
from remat.passes.offload.copies_in_graph import HostStay
from remat.schedule import Schedule
from remat.simulate import simulate

MIN_BYTES = 1 << 20
"""The smallest tensor that is offloaded: smaller ones cost more launches than memory."""

LEAST_GAIN = 0.001
"""The share of the step's time that offloading must save, at least."""

CANDIDATE_CUTS = 12
"""Checkpoint cuts of which the ones that need the most memory are used."""

INTEGER_GAP = 0.01
"""Relative gap of the integer programs."""

_INTEGER_TIME_LIMIT_S = 2.0
"""Time limit of each integer program."""

_COPY_COST = 0.01
"""Seconds that each second of a copy costs where it is hidden: on an H200, copies in both
directions slow down concurrent matrix products by 2%."""

_JUDGED_CUTS = 4
"""Cuts whose bounds judge a rewritten step."""

INSTANT_COPIES_FACTOR = 1e6
"""Copies are placed for a link that is faster by this factor where they take the least memory."""


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """The link, the bytes that may be on the host at once (None: any), and the smallest tensor that
    is offloaded."""

    link: Link
    host_bytes: int | None = None
    min_bytes: int = MIN_BYTES


@dataclass(frozen=True, slots=True)
class OffloadedForm(Generic[S]):
    """A step with offloaded tensors.

    `score_s` is a guess of its plan's time: a bound, and `waiting_s` for its copies. No plan takes
    less than `bound_s`, whichever candidates it offloads. `without_recompute_s` is the time without
    recomputation, infinity if that does not fit the budget. Copies are placed for `link`. The
    program that chose the tensors left `free_share` of the memory free.
    """

    base: S
    planned: PlannedStays
    link: Link
    score_s: float
    waiting_s: float
    bound_s: float
    without_recompute_s: float
    free_share: float

    def step(self) -> S:
        """Return `base` with the tensors offloaded."""
        return self.base.with_stays(self.planned, self.link)


def smallest_need_bytes(graph: Graph) -> int:
    """Return a lower bound on the peak of every plan of the order, whatever it offloads: only
    results have to stay on the device, recomputable or not."""
    operations = (
        operation if op == graph.boundary else replace(operation, recomputable=True)
        for op, operation in enumerate(graph.operations)
    )
    return peak_lower_bound_bytes(replace(graph, operations=tuple(operations)))


def values_to_offload(step: OffloadableStep, limits: OffloadLimits) -> list[int]:
    """Return the values that may be offloaded: of the forward, and of the backward if they are idle
    for as long as their copies take."""
    graph, link = step.graph(), limits.link
    values = step.offloadable_values(limits.min_bytes)
    end_s = [0.0, *accumulate(operation.cost_s for operation in graph.operations)]
    spans = idle_spans(graph, values)

    def is_idle_for_long(v: int) -> bool:
        if (span := spans.get(v)) is None or span.next_reader is None:
            return False
        idle_s = end_s[span.next_reader] - end_s[span.last_use + 1]
        return idle_s >= graph.values[v].size_bytes * (
            1 / link.to_host_bytes_per_s + 1 / link.to_device_bytes_per_s
        )

    return [
        v for v in values if not graph.operations[graph.producer[v]].backward or is_idle_for_long(v)
    ]


class OffloadPrograms(Generic[S]):
    """The programs that choose the tensors of a step to offload, at the checkpoint cuts that need
    more than a budget.

    `values` may be offloaded, and the forward produces the ones in `forward`. `cuts` are
    operations, the one that needs the most memory first; none if nothing can be offloaded.
    `has_ended` ends programs early.
    """

    def __init__(
        self,
        step: S,
        budget_bytes: int,
        limits: OffloadLimits,
        has_ended: Callable[[], bool],
    ) -> None:
        self.step = step
        self.graph = step.graph()
        self.budget_bytes = budget_bytes
        self.limits = limits
        self.has_ended = has_ended
        self.values = values_to_offload(step, limits)
        operations, producer = self.graph.operations, self.graph.producer
        self.forward = {v for v in self.values if not operations[producer[v]].backward}
        during_bytes = simulate(self.graph, Schedule.keep_all(self.graph)).during_bytes
        self.range_bytes = max(during_bytes, default=0) - self.graph.constant_bytes
        cuts = candidate_cuts(during_bytes, budget_bytes, CANDIDATE_CUTS)
        self.cuts = cuts if self.values else []

    def limits_at(
        self, cut: int, values: Iterable[int], limits: OffloadLimits | None = None
    ) -> HostLimits:
        """Return the limits of copies at a cut: values that the forward no longer reads, and values
        of the backward that are idle there, can be on the host. `limits` replace the limits of the
        search."""
        limits = limits or self.limits
        allowed = {
            v
            for v, span in idle_spans(self.graph, values).items()
            if span.last_use < cut
            and (v in self.forward or (span.next_reader is not None and cut <= span.next_reader))
        }
        return HostLimits(limits.link, limits.host_bytes, frozenset(allowed))

    def relaxed_cut(
        self, cut: int, host: HostLimits, *, recomputes: bool = True
    ) -> OffloadCut | None:
        """Return the solution of the linear program at a cut, which proves a bound; None without a
        solution. `recomputes` is False if nothing may be recomputed."""
        return relax_offload_cut(self.graph, self.budget_bytes, cut, host, recomputes=recomputes)

    def integral_cut(
        self,
        cut: int,
        host: HostLimits,
        free_bytes: int,
        *,
        gap: float = INTEGER_GAP,
        recomputes: bool = True,
    ) -> OffloadCut | None:
        """Return the solution of the integer program at a cut that leaves `free_bytes` of the
        budget free; None if there is none, or none in time. `recomputes` is False if nothing may be
        recomputed."""
        return relax_offload_cut(
            self.graph,
            self.budget_bytes - free_bytes,
            cut,
            host,
            gap=gap,
            copy_cost=_COPY_COST,
            time_limit=_INTEGER_TIME_LIMIT_S,
            recomputes=recomputes,
            is_cancelled=self.has_ended,
        )


def form_with_everything_offloaded(
    step: S, limits: OffloadLimits, *, overlaps: bool
) -> OffloadedForm[S]:
    """Return the form in which every tensor leaves right after its last use before its idle span,
    and comes back right before the next, or one operation earlier if `overlaps`.

    Without `overlaps` it takes the least memory, and waits for all copies back; with it, a copy
    runs during an operation. Where the host has no room for all tensors, the largest ones leave.
    """
    graph = step.graph()
    values = values_to_offload(step, limits)
    stays = stays_from_last_use(graph, values, limits.host_bytes, overlaps=overlaps)
    planned, instant = PlannedStays(stays, {}), limits.link.scaled(INSTANT_COPIES_FACTOR)
    everything = step.graph_with_stays(planned, instant)
    times = copy_times(everything, range(len(everything)), limits.link)
    return OffloadedForm(
        step,
        planned,
        instant,
        score_s=times.step_s,
        waiting_s=times.waiting_s,
        bound_s=graph.total_cost_s,
        without_recompute_s=times.step_s,
        free_share=1.0,
    )


def stays_from_last_use(
    graph: Graph, values: Iterable[int], host_bytes: int | None, *, overlaps: bool = False
) -> tuple[HostStay, ...]:
    """Return stays of values from their last use before the idle span to the next, or to the
    operation before that if `overlaps`, so that a copy runs during an operation. Where the host has
    no room for all of them, the largest ones leave."""
    spans = idle_spans(graph, values)
    stays: list[HostStay] = []
    free_bytes = math.inf if host_bytes is None else host_bytes
    for v in sorted(spans, key=lambda v: -graph.values[v].size_bytes):
        size_bytes, (last_use, reader) = graph.values[v].size_bytes, spans[v]
        if reader is not None and size_bytes <= free_bytes:
            free_bytes -= size_bytes
            reload_from = None if overlaps else skip_boundary(graph, reader)
            stays.append(HostStay(v, skip_boundary(graph, last_use + 1), reload_from))
    return tuple(stays)


def least_time_s(graph: Graph, budget_bytes: int, until_s: float = math.inf) -> float:
    """Return a lower bound on the time of every schedule of a graph within a budget, from a few
    cuts until the bound reaches `until_s`; infinity if one shows that none fits."""
    during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
    return least_time_from_live_bytes_s(graph, budget_bytes, during_bytes, until_s)


def least_time_from_live_bytes_s(
    graph: Graph, budget_bytes: int, during_bytes: tuple[int, ...], until_s: float
) -> float:
    """Return `least_time_s` from the bytes live during each run without recomputation."""
    if peak_lower_bound_bytes(graph) > budget_bytes:
        return math.inf
    bound_s = graph.total_cost_s
    for op in candidate_cuts(during_bytes, budget_bytes, CANDIDATE_CUTS)[:_JUDGED_CUTS]:
        if bound_s >= until_s:
            break
        bound_s = max(bound_s, linear_bound_s(graph, budget_bytes, op))
    return bound_s
