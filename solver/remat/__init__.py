"""remat: the optimal rematerialization solver for PyTorch.

    from remat import optimize
    gm = optimize(model, budget="8GiB")

The functions, the main classes and the errors are here. The baseline strategies are in
`remat.strategies`; other types are in their modules. Importing remat does not import torch: the
names that need it are loaded when first used, as is the client of the service.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from remat.compare import compare
from remat.costs.devices import Link
from remat.costs.roofline import Roofline
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import (
    BudgetError,
    BudgetWarning,
    DocumentError,
    GuardError,
    HookWarning,
    InfeasibleBudget,
    OutputNotComputed,
    RematError,
    ServiceError,
    SolverError,
    SolverTimeout,
    SolverWarning,
    TraceError,
)
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.progress import Progress
from remat.rewrite import rewrite
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve, sweep
from remat.strategies import Auto, Exact, Selective
from remat.version import VERSION

if TYPE_CHECKING:
    from remat.frontend.api.enable import disable, enable, plans
    from remat.frontend.api.estimate import estimate
    from remat.frontend.api.fit import fit
    from remat.frontend.api.max_batch import max_batch
    from remat.frontend.api.optimize import optimize, solve_step
    from remat.frontend.api.watch import watch
    from remat.frontend.capture.trace import trace
    from remat.frontend.compile.backend import compile
    from remat.frontend.compile.partitioner import Partitioner
    from remat.frontend.compile.registry import compiled_plans
    from remat.frontend.costs.measure import measure
    from remat.frontend.emit.emit import emit
    from remat.frontend.runtime.module import RematModule, lower
    from remat.service.client import Client
    from remat.snapshots.why import why

_LOADED_LATER = {
    "Client": "service.client",
    "Partitioner": "frontend.compile.partitioner",
    "compile": "frontend.compile.backend",
    "compiled_plans": "frontend.compile.registry",
    "estimate": "frontend.api.estimate",
    "max_batch": "frontend.api.max_batch",
    "RematModule": "frontend.runtime.module",
    "lower": "frontend.runtime.module",
    "measure": "frontend.costs.measure",
    "disable": "frontend.api.enable",
    "emit": "frontend.emit.emit",
    "enable": "frontend.api.enable",
    "fit": "frontend.api.fit",
    "optimize": "frontend.api.optimize",
    "solve_step": "frontend.api.optimize",
    "plans": "frontend.api.enable",
    "trace": "frontend.capture.trace",
    "watch": "frontend.api.watch",
    "why": "snapshots.why",
}

__all__ = [
    "Auto",
    "BudgetError",
    "BudgetWarning",
    "Client",
    "DocumentError",
    "Exact",
    "Graph",
    "GuardError",
    "HookWarning",
    "InfeasibleBudget",
    "Link",
    "Operation",
    "OutputNotComputed",
    "Partitioner",
    "Plan",
    "Program",
    "Progress",
    "RematError",
    "RematModule",
    "Roofline",
    "Schedule",
    "Selective",
    "ServiceError",
    "SolverError",
    "SolverTimeout",
    "SolverWarning",
    "Trace",
    "TraceError",
    "Value",
    "compare",
    "compile",
    "compiled_plans",
    "disable",
    "emit",
    "enable",
    "estimate",
    "fit",
    "lower",
    "max_batch",
    "measure",
    "optimize",
    "plans",
    "rewrite",
    "simulate",
    "solve",
    "solve_step",
    "sweep",
    "trace",
    "watch",
    "why",
]

__version__ = VERSION


def __getattr__(name: str) -> object:
    if name in _LOADED_LATER:
        value = getattr(import_module(f"remat.{_LOADED_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'remat' has no attribute {name!r}")
