"""Simulated annealing over a `ScheduleProfile`: the loop that both searches share.

The energy is time, in units of an operation's mean cost, plus a price for bytes over the budget, in
units of a value's mean size. While the temperature falls, the price rises: early on the sequence
may be far over the budget, at the end hardly at all (FastSA, NeurIPS 2023, anneals over sequences
too, with other moves and a constant price).

Deterministic for a seed: work is counted in moves tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from remat.heuristics.annealing.moves import Move
from remat.heuristics.annealing.schedule_profile import ScheduleProfile

_MOVES_PER_RESET = 20_000
"""Moves after which the slots are spread evenly again."""

_MOVES_PER_CHECK = 250
"""Moves between calls of `stop`."""


@dataclass(frozen=True, slots=True)
class CoolingSchedule:
    """Temperature and price at the first and the last move; both change by a constant factor per
    move."""

    start_temperature: float
    end_temperature: float
    start_price: float
    end_price: float


@dataclass(frozen=True, slots=True)
class MoveMix:
    """The moves to try, each with its relative frequency."""

    weighted_moves: tuple[tuple[Move, int], ...]

    def move_table(self) -> list[Move]:
        """Return each move as often as its frequency says."""
        return [move for move, count in self.weighted_moves for _ in range(count)]


def anneal(
    profile: ScheduleProfile,
    random: Random,
    cooling: CoolingSchedule,
    mix: MoveMix,
    *,
    max_moves: int,
    on_fit: Callable[[ScheduleProfile], bool],
    stop: Callable[[], bool],
) -> None:
    """Change `profile` by random moves, at most `max_moves` of them.

    `on_fit` is called after every change that leaves the sequence within the budget. It may set
    another budget, and ends the search by returning True.
    """
    sample, exp, table = random.random, math.exp, mix.move_table()
    per_second = _inverse_mean(profile.cost)
    per_byte = _inverse_mean(profile.size)
    temperature = price = 0.0
    for move_number in range(max_moves):
        if move_number % _MOVES_PER_CHECK == 0:
            if stop():
                return
            progress = move_number / max_moves
            temperature = (
                cooling.start_temperature
                * (cooling.end_temperature / cooling.start_temperature) ** progress
            )
            price = (
                per_byte
                * cooling.start_price
                * (cooling.end_price / cooling.start_price) ** progress
            )
            if move_number % _MOVES_PER_RESET == 0:
                profile.reset(profile.runs, profile.budget_bytes)
        if not table[int(sample() * len(table))](profile, random):
            profile.revert()
            continue
        change = price * profile.evaluate() + per_second * profile.time_change_s
        if change <= 0 or sample() < exp(-change / temperature):
            profile.commit()
            if not profile.excess_bytes and on_fit(profile):
                return
        else:
            profile.revert()


def _inverse_mean(numbers: list[float]) -> float:
    """Return one over the mean of the numbers that are not zero."""
    counted = [x for x in numbers if x]
    return len(counted) / math.fsum(counted) if counted else 1.0
