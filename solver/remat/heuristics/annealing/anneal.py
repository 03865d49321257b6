"""Simulated annealing over a `Profile`: the loop that both searches share.

Energy is time, in units of an operation's mean cost, plus a price for bytes over the budget, in
units of a value's mean size. While the temperature falls, the price rises: early on the sequence
may be far over the budget, at the end hardly at all (FastSA, NeurIPS 2023, anneals over sequences
too, with other moves and without a price that rises).

Deterministic for a seed: work is counted in moves tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from remat.heuristics.annealing.moves import Move
from remat.heuristics.annealing.profile import Profile

_LAY_OUT = 20_000
"""Moves after which the slots are spread evenly again."""

_CHECK = 250
"""Moves between looks at `stop`."""


@dataclass(frozen=True, slots=True)
class Cooling:
    """Temperature and price at the first and the last move; both change by a constant factor."""

    hot: float
    cold: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Mix:
    """Moves and how often each is tried, in parts of the sum."""

    parts: tuple[tuple[Move, int], ...]

    def table(self) -> list[Move]:
        """One entry a part."""
        return [move for move, count in self.parts for _ in range(count)]


def anneal(
    profile: Profile,
    random: Random,
    cooling: Cooling,
    mix: Mix,
    *,
    effort: int,
    fits: Callable[[Profile], bool],
    stop: Callable[[], bool],
) -> None:
    """Change `profile` by random moves, `effort` of them at most.

    `fits` is called after every change that leaves the sequence within the budget; it may give the
    profile another budget, and ends the search by returning True.
    """
    draw, exp, table = random.random, math.exp, mix.table()
    per_s = _over_mean(profile.cost)
    per_byte = _over_mean(profile.size)
    temperature = price = 0.0
    for turn in range(effort):
        if turn % _CHECK == 0:
            if stop():
                return
            part = turn / effort
            temperature = cooling.hot * (cooling.cold / cooling.hot) ** part
            price = per_byte * cooling.low * (cooling.high / cooling.low) ** part
            if turn % _LAY_OUT == 0:
                profile.lay_out(profile.runs, profile.budget_bytes)
        if not table[int(draw() * len(table))](profile, random):
            profile.undo()
            continue
        change = price * profile.weigh() + per_s * profile.extra_s
        if change <= 0 or draw() < exp(-change / temperature):
            profile.keep()
            if not profile.excess_bytes and fits(profile):
                return
        else:
            profile.undo()


def _over_mean(numbers: list[float]) -> float:
    """One over the mean of those that are not zero."""
    counted = [x for x in numbers if x]
    return len(counted) / math.fsum(counted) if counted else 1.0
