"""Variants of a step: alternative divisions of its joint graph into fusion groups.

All variants are planned, because it is not known in advance which is better: saving less for the
backward leaves more memory at its start, and takes more memory while its kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from remat.errors import InfeasibleBudget, RematError
from remat.frontend.compile.joint.fx_utils import is_collective
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.execution_order import reorder_for_peak
from remat.frontend.compile.kernels.fused_recompute import with_fused_recomputation
from remat.frontend.compile.kernels.fusion_groups import FusionGroup, find_fusion_groups
from remat.frontend.compile.kernels.inline_producers import inline_producers
from remat.frontend.compile.kernels.separate_reductions import with_separate_reductions
from remat.plan import Plan

Variant = tuple[CompiledJointGraph, list[FusionGroup]]
"""A joint graph and its fusion groups in execution order."""


def find_variants(joint: CompiledJointGraph, *, baseline_only: bool) -> list[Variant]:
    """Return the variants to plan: the step as torch.compile runs it and, unless `baseline_only`,
    one with separate reductions, fused recomputation and inlined random masks, if it differs."""
    groups = find_fusion_groups(joint)
    variants = [(joint, inline_producers(joint, groups))]
    if joint.kernels is not None and not baseline_only:
        num_kernels = len(groups)
        groups = with_separate_reductions(joint, groups)
        has_separate_reductions = len(groups) > num_kernels
        joint, groups = with_fused_recomputation(joint, groups) or (joint, groups)
        fused = inline_producers(joint, groups, inline_random=True)
        if has_separate_reductions:
            fused = reorder_for_peak(joint, fused)
        baseline = variants[0][1]
        is_different = [g.written for g in fused] != [g.written for g in baseline]
        # Each process selects a variant by its own timings: all need the same order of collectives.
        if is_different and _collectives(fused) == _collectives(baseline):
            variants.append((joint, fused))
    return variants


def _collectives(groups: Sequence[FusionGroup]) -> list[fx.Node]:
    """Return the collective operations in execution order."""
    return [node for group in groups for node in group.all_nodes if is_collective(node)]


def objective(plan: Plan, *, minimize_peak: bool) -> tuple[float, float]:
    """Return the sort key of a plan among those of the variants; the smallest is the best. It is
    the peak with `minimize_peak`, else whether the plan recomputes anything; then the time."""
    has_recomputation = len(plan.schedule) > len(plan.graph)
    return (plan.peak_bytes if minimize_peak else has_recomputation, plan.time_s)


def least_demanding_error(errors: Sequence[RematError]) -> RematError:
    """Return the error with the smallest minimum feasible budget."""

    def min_budget(error: RematError) -> float:
        min_bytes = error.min_feasible_bytes if isinstance(error, InfeasibleBudget) else None
        return float("inf") if min_bytes is None else min_bytes

    return min(errors, key=min_budget)
