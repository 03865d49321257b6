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
`Strategy`. Modules: `base` and `option_types` define these types, `auto` and `exact` the two
strategies that `search` implements, `baselines` the others, `infeasible` the error of both;
`registry` has them by name.
"""

from remat.solution import Solution
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, Task
from remat.strategies.baselines.articulation import ArticulationPoints
from remat.strategies.baselines.checkmate import CheckmateMilp
from remat.strategies.baselines.chen import ChenGreedy, ChenSqrt
from remat.strategies.baselines.knapsack import Knapsack
from remat.strategies.baselines.lp_rounding import LpRounding
from remat.strategies.baselines.revolve import Revolve
from remat.strategies.baselines.rotor import Rotor
from remat.strategies.baselines.selective import Selective
from remat.strategies.baselines.uniform import EveryK, KeepAll, PerBlock, RecomputeAll
from remat.strategies.exact import Exact

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
