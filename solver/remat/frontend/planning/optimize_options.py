"""The options of `remat.optimize` and `remat.enable` as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remat.costs.devices import Link
from remat.costs.roofline import Roofline
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.frontend.common.operators import NAMESPACES
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.memory.device_memory import Reserve
from remat.limits.budget import Budget
from remat.limits.infeasible import INFEASIBLE_ERROR
from remat.limits.options import OFFLOAD_OFF, OUTPUTS_HELD, SPLIT_AUTO
from remat.plan import Plan
from remat.progress import ProgressCallback
from remat.strategies import Strategy

MEASURED_BY_SERVICE = "elsewhere"
"""A value of `OptimizeOptions.costs`: the `service` that solves also measures the costs."""

Service = Callable[[Trace, int | str], tuple[Plan, Program]]
"""Solves a trace within a budget in another process, such as a remat server."""


@dataclass(frozen=True)
class OptimizeOptions:
    """The options of `remat.optimize` and `remat.enable`; see there. A `budget` of None is "auto":
    what the device has free. A `progress` that is not a function is for `planning_line`."""

    budget: Budget | None
    strategy: Strategy | None = None
    costs: str | Roofline | None = None
    cache: str | CostCache | None = None
    differentiate: str | tuple[str, ...] = "auto"
    max_plans: int = 8
    progress: ProgressCallback | bool | None = None
    namespaces: frozenset[str] = NAMESPACES
    service: Service | None = None
    reserve: Reserve | None = None
    cuda_graphs: bool = False
    outputs: str = OUTPUTS_HELD
    scope: str = "model"
    in_flight: int = 1
    split: str | int = SPLIT_AUTO
    offload: str = OFFLOAD_OFF
    host_budget: int | str | None = None
    link: Link | None = None
    infeasible: str = INFEASIBLE_ERROR

    @property
    def progress_callback(self) -> ProgressCallback | None:
        """The function that receives the progress of solves; None if there is none."""
        return self.progress if callable(self.progress) else None
