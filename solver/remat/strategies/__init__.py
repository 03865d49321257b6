"""Ways to look for a schedule: frozen dataclasses whose fields are their options."""

from remat.solution import Solution
from remat.strategies.articulation import ArticulationPoints
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, Task
from remat.strategies.checkmate import CheckmateMilp
from remat.strategies.chen_greedy import ChenGreedy
from remat.strategies.chen_sqrt import ChenSqrt
from remat.strategies.every_k import EveryK
from remat.strategies.exact import Exact
from remat.strategies.keep_all import KeepAll
from remat.strategies.knapsack import Knapsack
from remat.strategies.lp_rounding import LpRounding
from remat.strategies.per_block import PerBlock
from remat.strategies.recompute_all import RecomputeAll
from remat.strategies.revolve import Revolve
from remat.strategies.rotor import Rotor

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
    "Solution",
    "Strategy",
    "Task",
]
