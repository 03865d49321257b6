"""Ways to look for a schedule: frozen dataclasses whose fields are their options."""

from remat.solution import Solution
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, Task
from remat.strategies.baselines.articulation import ArticulationPoints
from remat.strategies.baselines.chains.revolve import Revolve
from remat.strategies.baselines.chains.rotor import Rotor
from remat.strategies.baselines.chen_greedy import ChenGreedy
from remat.strategies.baselines.chen_sqrt import ChenSqrt
from remat.strategies.baselines.every_k import EveryK
from remat.strategies.baselines.keep_all import KeepAll
from remat.strategies.baselines.knapsack import Knapsack
from remat.strategies.baselines.per_block import PerBlock
from remat.strategies.baselines.published_milp.checkmate import CheckmateMilp
from remat.strategies.baselines.published_milp.lp_rounding import LpRounding
from remat.strategies.baselines.recompute_all import RecomputeAll
from remat.strategies.baselines.selective import Selective
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
