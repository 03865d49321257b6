"""Instances of every registered strategy that needs no MILP solver."""

from __future__ import annotations

from remat.strategies import Strategy
from remat.strategies.baselines.chen import ChenGreedy
from remat.strategies.baselines.uniform import EveryK
from remat.strategies.published.chain_checkpoints import Rotor
from remat.strategies.registry import COMPARED_AS, STRATEGIES

VARIANTS: dict[str, tuple[Strategy, ...]] = {
    "every_k": (EveryK(), EveryK(2)),
    "chen_greedy": (ChenGreedy(), ChenGreedy(3)),
    "rotor": (Rotor(slots=60),),
}
"""Strategies that are tested with other options than `compare` uses."""


BY_PROGRAMS = ("auto", "exact", "lp_rounding", "checkmate")


QUICK: tuple[Strategy, ...] = tuple(
    strategy
    for name, kind in STRATEGIES.items()
    if name not in BY_PROGRAMS
    for strategy in VARIANTS.get(name) or COMPARED_AS.get(name) or (kind(),)
)
"""Every registered strategy that solves no program: a new one is tested by the same laws."""
