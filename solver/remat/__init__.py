"""remat: the optimal rematerialization solver for PyTorch.

    from remat import optimize
    gm = optimize(model, budget="8GiB")

Importing remat imports no torch; the names of the torch side are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from remat.batch import MaxBatch
from remat.blockwise.blocks_plan import BlockCall, BlocksPlan
from remat.blockwise.policies import BlockPolicy, Policies
from remat.compare import Comparison, compare
from remat.costs.roofline import Roofline
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import (
    BudgetError,
    DocumentError,
    GraphError,
    GuardError,
    HookWarning,
    InfeasibleBudget,
    RematError,
    ServiceError,
    SolverError,
    SolverTimeout,
    SolverWarning,
    TraceError,
    UnknownName,
)
from remat.graph import Graph, Operation, Value
from remat.plan import Plan, Status
from remat.progress import Progress
from remat.report.estimate import Estimate
from remat.rewrite import rewrite
from remat.schedule import Schedule
from remat.service.client import Client
from remat.simulate import Timeline, simulate
from remat.solve import solve, sweep
from remat.strategies import (
    ArticulationPoints,
    Auto,
    CheckmateMilp,
    ChenGreedy,
    ChenSqrt,
    EveryK,
    Exact,
    KeepAll,
    Knapsack,
    LpRounding,
    PerBlock,
    RecomputeAll,
    Revolve,
    Rotor,
    Selective,
)
from remat.version import VERSION

if TYPE_CHECKING:
    from remat.frontend.api.enable import disable, enable, plans
    from remat.frontend.api.estimate import estimate
    from remat.frontend.api.max_batch import max_batch
    from remat.frontend.api.optimize import optimize
    from remat.frontend.capture.trace import trace
    from remat.frontend.compile.backend import compile
    from remat.frontend.compile.partitioner import Partitioner
    from remat.frontend.compile.registry import CompiledPlan, compiled_plans
    from remat.frontend.costs.cost_cache import CostCache
    from remat.frontend.costs.measure import measure
    from remat.frontend.emit.emit import emit
    from remat.frontend.memory.meter import LiveStorageMeter
    from remat.frontend.runtime.module import RematModule, lower

_TORCH_SIDE = {
    "CompiledPlan": "compile.registry",
    "Partitioner": "compile.partitioner",
    "compile": "compile.backend",
    "compiled_plans": "compile.registry",
    "CostCache": "costs.cost_cache",
    "LiveStorageMeter": "memory.meter",
    "estimate": "api.estimate",
    "max_batch": "api.max_batch",
    "RematModule": "runtime.module",
    "lower": "runtime.module",
    "measure": "costs.measure",
    "disable": "api.enable",
    "emit": "emit.emit",
    "enable": "api.enable",
    "optimize": "api.optimize",
    "plans": "api.enable",
    "trace": "capture.trace",
}

__all__ = [
    "ArticulationPoints",
    "Auto",
    "BlockCall",
    "BlockPolicy",
    "BlocksPlan",
    "BudgetError",
    "CheckmateMilp",
    "ChenGreedy",
    "ChenSqrt",
    "Client",
    "Comparison",
    "CompiledPlan",
    "CostCache",
    "DocumentError",
    "Estimate",
    "EveryK",
    "Exact",
    "Graph",
    "GraphError",
    "GuardError",
    "HookWarning",
    "InfeasibleBudget",
    "KeepAll",
    "Knapsack",
    "LiveStorageMeter",
    "LpRounding",
    "MaxBatch",
    "Operation",
    "Partitioner",
    "PerBlock",
    "Plan",
    "Policies",
    "Program",
    "Progress",
    "RecomputeAll",
    "RematError",
    "RematModule",
    "Revolve",
    "Roofline",
    "Rotor",
    "Schedule",
    "Selective",
    "ServiceError",
    "SolverError",
    "SolverTimeout",
    "SolverWarning",
    "Status",
    "Timeline",
    "Trace",
    "TraceError",
    "UnknownName",
    "Value",
    "compare",
    "compile",
    "compiled_plans",
    "disable",
    "emit",
    "enable",
    "estimate",
    "lower",
    "max_batch",
    "measure",
    "optimize",
    "plans",
    "rewrite",
    "simulate",
    "solve",
    "sweep",
    "trace",
]

__version__ = VERSION


def __getattr__(name: str) -> object:
    if name in _TORCH_SIDE:
        found = getattr(import_module(f"remat.frontend.{_TORCH_SIDE[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'remat' has no attribute {name!r}")
