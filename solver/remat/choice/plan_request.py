"""`PlanRequest`: the memory that the plan of a step may take, and what it may do to the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.choice.offloaded_forms import OffloadLimits
from remat.limits.infeasible import INFEASIBLE_ERROR
from remat.limits.limits import Limits
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy


@dataclass(frozen=True)
class PlanRequest:
    """The input of `plan_step`, for all entry points.

    `limits` are the budget and what others need of it; `segments_bytes`, if given, limits what
    torch's allocator reserves. Operations may be split into one of these numbers of `pieces`, and
    tensors offloaded within the limits of `offload`: () splits nothing, None offloads nothing. All
    solves together take the time limit of `strategy`. `infeasible` is "error" or "smallest".
    """

    limits: Limits
    strategy: Strategy = field(default_factory=Auto)
    pieces: tuple[int, ...] = ()
    offload: OffloadLimits | None = None
    infeasible: str = INFEASIBLE_ERROR
    segments_bytes: int | None = None
