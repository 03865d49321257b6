"""Log lines of a compilation, by the logger "remat" at level INFO:

logging.basicConfig()
logging.getLogger("remat").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging

from remat.frontend.compile.registry import CompiledPlan, ReplanFeedback
from remat.limits.units import format_bytes, format_seconds
from remat.report.offloads import offload_lines

logger = logging.getLogger("remat")


def log_planning_start(
    title: str, operations: int, budget: int | float | str, feedback: ReplanFeedback
) -> None:
    """Log that a graph is planned, with the budget as the user requested it."""
    excess_bytes = feedback.excess_bytes
    changes = f", reduced by {format_bytes(excess_bytes)}" if excess_bytes else ""
    if feedback.separate_buffers:
        changes += f", {len(feedback.separate_buffers)} values not in place"
    logger.info("%s: planning %d operations within %s%s", title, operations, budget, changes)


def log_kernels(
    title: str, num_forward: int, num_backward: int, elapsed_s: float, *, inductor: bool
) -> None:
    """Log the number of kernels, or of operations without Inductor, that are scheduled."""
    logger.info(
        "%s: %d %s in the forward, %d in the backward, captured in %s",
        title,
        num_forward,
        "Inductor kernels" if inductor else "operations",
        num_backward,
        format_seconds(elapsed_s),
    )


def log_solved(compiled: CompiledPlan) -> None:
    """Log the peak and time of a new plan."""
    plan = compiled.plan
    if compiled.is_plain:
        logger.info(
            "%s: keeps Inductor's own kernels, as under plain torch.compile: peak %s",
            compiled.title,
            format_bytes(compiled.baseline_bytes),
        )
        return
    logger.info(
        "%s: solved in %s: peak %s instead of %s, budget %s; time %+.2f%%, %d recomputations%s",
        compiled.title,
        format_seconds(float(plan.stats.get("total_s", 0.0))),
        format_bytes(plan.peak_bytes),
        format_bytes(compiled.baseline_bytes),
        format_bytes(plan.budget_bytes),
        100 * plan.overhead,
        sum(plan.schedule.recomputed(plan.graph).values()),
        "".join(f"; {line}" for line in offload_lines(plan)),
    )


def log_without_offload(title: str, reason: str) -> None:
    """Log that a graph is planned without offloading, and why."""
    logger.info("%s: planning without offloading, as %s", title, reason)


def log_verified_peak(compiled: CompiledPlan, half: str) -> None:
    """Log the peak of Inductor's kernels for the "forward" or the "backward"."""
    budget_bytes = compiled.budget_bytes
    budget = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}"
    peak = format_bytes(compiled.verified_by_half[half])
    logger.info("%s: verified: the %s's kernels use %s%s", compiled.title, half, peak, budget)


def log_cache_hit(compiled: CompiledPlan) -> None:
    """Log that the code of a graph, and its plan, are those of an earlier process."""
    peak = format_bytes(compiled.plan.peak_bytes)
    logger.info("%s: plan and code are from torch's cache; planned peak %s", compiled.title, peak)


def log_split(title: str, pieces: int) -> None:
    """Log that the largest operations are split, as no plan without that fits the budget."""
    logger.info(
        "%s: no plan fits the budget; splitting the largest operations into %d pieces",
        title,
        pieces,
    )


def log_no_loss(title: str) -> None:
    """Warn that a graph returns all of its outputs, although only the loss was asked for."""
    logger.warning(
        '%s: outputs="loss" has no effect on this graph, none of whose outputs is a loss: either '
        "the model returns none, or Dynamo breaks its graph before (see torch._dynamo.explain)",
        title,
    )


def log_no_time_for_pieces(title: str, pieces: int) -> None:
    """Log that "min" skips a number of pieces for lack of time."""
    logger.info(
        "%s: no time to plan the largest operations in %d pieces; pass split=%d, or a larger "
        "time_limit, to plan with them",
        title,
        pieces,
        pieces,
    )


def log_smaller_in_pieces(title: str, pieces: int, peak_bytes: int, whole_bytes: int) -> None:
    """Log that "min" selects a plan in pieces."""
    logger.info(
        "%s: the largest operations in %d pieces: peak %s, without pieces %s",
        title,
        pieces,
        format_bytes(peak_bytes),
        format_bytes(whole_bytes),
    )


def log_not_split(title: str, reason: str) -> None:
    """Log why the operations of a graph stay whole."""
    logger.info("%s: not split: %s", title, reason)


def log_replan(title: str, reason: str) -> None:
    """Log why a graph is replanned."""
    logger.info("%s: replanning, as %s", title, reason)


def warn_of_calls_in_flight(title: str) -> None:
    """Warn that a graph is called several times before one backward."""
    logger.warning(
        "%s is called again before the backward of its last call. The saved tensors of all calls "
        "are in memory, and the plan is for one call, so the step may exceed the budget. Pass a "
        "smaller budget, call the model once with all inputs concatenated, or use remat.enable, "
        "which plans for several calls (in_flight=)",
        title,
    )
