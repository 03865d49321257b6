"""Strategies: the algorithms that find a schedule for a graph and a budget.

A strategy is a frozen dataclass whose fields are its options; pass it to `remat.solve`,
`remat.sweep` or `remat.compare`. Import the baselines from here:

    from remat.strategies import PerBlock, Rotor
    remat.solve(graph, "60%", PerBlock())

- `Auto`: the default, for graphs of any size; `Exact`: the optimum, for small graphs.
- `KeepAll`, `RecomputeAll`: no recomputation, and as much as possible.
- `PerBlock`, `EveryK`: torch.utils.checkpoint around each block, or around k of them.
- `ChenSqrt`, `ChenGreedy`, `ArticulationPoints`: segments of the forward pass (Chen et al., 2016).
- `Revolve`, `Rotor`: optimal checkpointing of chains.
- `Knapsack`, `Selective`: the best set of forward values to save.
- `CheckmateMilp`, `LpRounding`: Checkmate as published (Jain et al., MLSys 2020).

A strategy of your own has a `name` and a method `run` from a `Task` to a `Solution`: see
`Strategy`. Modules: `base` and `option_types` define these types, `auto` the two strategies that
`search` implements, with `orders` for graphs that are no training step, `baselines` those that a
search starts from, `published` the others; `registry` has them by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from remat.solution import Solution
from remat.strategies.auto import Auto, Exact
from remat.strategies.base import Strategy, Task
from remat.strategies.baselines.chen import ArticulationPoints, ChenGreedy, ChenSqrt
from remat.strategies.baselines.saved_values import Knapsack, Selective
from remat.strategies.baselines.uniform import EveryK, KeepAll, PerBlock, RecomputeAll

if TYPE_CHECKING:
    from remat.strategies.published.chain_checkpoints import Revolve, Rotor
    from remat.strategies.published.checkmate import CheckmateMilp, LpRounding

_PUBLISHED = {
    "CheckmateMilp": "checkmate",
    "LpRounding": "checkmate",
    "Revolve": "chain_checkpoints",
    "Rotor": "chain_checkpoints",
}

__all__ = [
    "ArticulationPoints",
    "Auto",
    "CheckmateMilp",
    "ChenGreedy",
    "ChenSqrt",
    "EveryK",
    "Exact",
    "KeepAll",
    "Knapsack",
    "LpRounding",
    "PerBlock",
    "RecomputeAll",
    "Revolve",
    "Rotor",
    "Selective",
    "Solution",
    "Strategy",
    "Task",
]


def __getattr__(name: str) -> object:
    if name in _PUBLISHED:
        return getattr(import_module(f"remat.strategies.published.{_PUBLISHED[name]}"), name)
    raise AttributeError(f"module 'remat.strategies' has no attribute {name!r}")
