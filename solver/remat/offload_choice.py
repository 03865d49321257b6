"""The choice of tensors to offload: a few sets are solved within the budget, and the fastest kept.

The plan without offloading is one of them, so that nothing is offloaded where it does not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.costs.link import Link
from remat.documents.targets import OFFLOAD_TARGET
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget
from remat.passes.offload.candidates import Candidate, offload_candidates
from remat.passes.offload.copies import CopyTimes, copy_times
from remat.passes.offload.rewriting import offload_tensors
from remat.plan import Plan

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the candidates' bytes that are tried."""

MIN_BYTES = 1 << 20
"""The smallest tensor that is offloaded: smaller ones cost more launches than memory."""


@dataclass(frozen=True)
class OffloadedPlan:
    """A plan, the trace that it is for, and the times of its copies; those are of a step without
    copies if nothing is offloaded."""

    plan: Plan
    trace: Trace
    times: CopyTimes

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The tensors that wait on the host."""
        nodes = (node for node in self.trace.nodes if node.target == OFFLOAD_TARGET)
        return tuple(node.operand_names[0] for node in nodes)


def solve_with_offload(
    trace: Trace,
    link: Link,
    solve: Callable[[Trace], Plan],
    *,
    host_budget_bytes: int | None = None,
    min_bytes: int = MIN_BYTES,
) -> OffloadedPlan:
    """Return the fastest plan, with tensors on the host or without, its waiting included.

    `solve` solves a trace within the caller's budget. At most `host_budget_bytes` are on the host
    at once; None is no limit. Raises the `InfeasibleBudget` of the trace without offloading if no
    set meets the budget either.
    """
    best: OffloadedPlan | None = None
    infeasible: InfeasibleBudget | None = None
    for tensors in _sets(trace, link, host_budget_bytes, min_bytes):
        changed = offload_tensors(trace, tensors, link) if tensors else trace
        try:
            plan = solve(changed)
        except InfeasibleBudget as error:
            infeasible = infeasible or error
            continue
        candidate = OffloadedPlan(plan, changed, copy_times(changed, plan.schedule.runs, link))
        if best is None or candidate.times.step_s < best.times.step_s:
            best = candidate
    if best is None:
        assert infeasible is not None
        raise infeasible
    return best


def _sets(
    trace: Trace, link: Link, host_budget_bytes: int | None, min_bytes: int
) -> Iterator[tuple[str, ...]]:
    """Yield sets of tensors to offload, first none: growing ones of those that are unused longest,
    compared with the time of their copies."""
    yield ()
    seconds = [0.0 if node.view else node.cost_s or 0.0 for node in trace.nodes]
    starts_s = [0.0]
    for cost_s in seconds:
        starts_s.append(starts_s[-1] + cost_s)

    def slack(candidate: Candidate) -> float:
        unused_s = starts_s[candidate.first_backward_reader] - starts_s[candidate.producer + 1]
        copies_s = candidate.size_bytes * (
            1 / link.to_host_bytes_per_s + 1 / link.to_device_bytes_per_s
        )
        return unused_s / copies_s

    ranked = sorted(
        (c for c in offload_candidates(trace) if c.size_bytes >= min_bytes), key=slack, reverse=True
    )
    total = sum(c.size_bytes for c in ranked)
    seen: set[tuple[str, ...]] = {()}
    for share in SHARES:
        limit_bytes = share * total
        if host_budget_bytes is not None:
            limit_bytes = min(limit_bytes, host_budget_bytes)
        chosen: list[str] = []
        size = 0
        for candidate in ranked:
            if size + candidate.size_bytes <= limit_bytes and slack(candidate) > 1:
                chosen.append(candidate.tensor)
                size += candidate.size_bytes
        if (tensors := tuple(chosen)) not in seen:
            seen.add(tensors)
            yield tensors
