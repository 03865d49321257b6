"""The ways to run a step that are planned, and which plan is taken.

Which is better is not known before: what keeps less for the backward leaves it more memory at its
start, and needs more of it while its kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from remat.errors import InfeasibleBudget, RematError
from remat.frontend.compile.joint.fx_utils import is_collective
from remat.frontend.compile.joint.joint_graph import Joint
from remat.frontend.compile.kernels.fused_recompute import made_beside
from remat.frontend.compile.kernels.fusion_groups import Region, find_regions
from remat.frontend.compile.kernels.inline_producers import inlined
from remat.plan import Plan

Way = tuple[Joint, list[Region]]


def ways_of(joint: Joint, *, sturdy: bool) -> list[Way]:
    """As torch.compile would run the step; and, but for `sturdy` ones, with less kept for the
    backward."""
    regions = find_regions(joint)
    ways = [(joint, inlined(joint, regions))]
    if joint.kernels is not None and not sturdy:
        joint, regions = made_beside(joint, regions) or (joint, regions)
        less = inlined(joint, regions, draws=True)
        other = _outline(less) != _outline(ways[0][1])
        # Processes choose between ways by their own clocks: all need the same order.
        if other and _collectives(less) == _collectives(ways[0][1]):
            ways.append((joint, less))
    return ways


def _outline(regions: Sequence[Region]) -> list[list[fx.Node]]:
    return [region.written for region in regions]


def _collectives(regions: Sequence[Region]) -> list[fx.Node]:
    return [n for region in regions for n in region.all_nodes if is_collective(n)]


def badness(plan: Plan, *, is_smallest: bool) -> tuple[float, float]:
    """Less is better: a plan that runs nothing again before others, then the quickest; where the
    smallest is wanted, the smallest peak."""
    again = len(plan.schedule) > len(plan.graph)
    return (plan.peak_bytes if is_smallest else again, plan.time_s)


def least(failed: Sequence[RematError]) -> RematError:
    """Of errors, that which asks for the least memory."""

    def asked(error: RematError) -> float:
        found = error.min_feasible_bytes if isinstance(error, InfeasibleBudget) else None
        return float("inf") if found is None else found

    return min(failed, key=asked)
