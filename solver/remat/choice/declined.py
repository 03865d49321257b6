"""Plans without offloading, with the reason why nothing is offloaded."""

from __future__ import annotations

from dataclasses import replace

from remat.choice.offloadable_step import S, StepPlan
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_data import NOT_OFFLOADED_STAT


def with_reason(without: StepPlan[S], reason: str) -> StepPlan[S]:
    """Return a plan without offloading that records why nothing is offloaded."""
    stats = {**without.plan.stats, NOT_OFFLOADED_STAT: reason}
    return without._replace(plan=replace(without.plan, stats=stats))


def reason_to_decline(without: StepPlan[S], offloaded: Plan | None, min_bytes: int) -> str:
    """Return why a plan without offloading is taken. `offloaded` is the fastest one with, and
    `min_bytes` the size of the smallest tensor that is offloaded."""
    if offloaded is not None:
        return f"no plan with offloading is faster than {offloaded.overhead:+.3%}"
    if len(without.plan.schedule) == len(without.plan.graph):
        return "the step fits the budget without recomputation"
    if not without.step.offloadable_values(min_bytes):
        return f"no tensor of {format_bytes(min_bytes)} or more can be on the host"
    return "no plan with offloading is within the budget"
