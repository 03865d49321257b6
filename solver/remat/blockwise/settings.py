"""Executors that take one setting for all blocks, of which there are few: each is tried."""

from __future__ import annotations

from collections.abc import Sequence

from remat.blockwise.choose import NEAR_MIN, check_feasible
from remat.blockwise.step import BlockStep

Setting = tuple[int, ...]
"""The way of each call."""


def cheapest_setting(
    step: BlockStep, settings: Sequence[Setting], budget_bytes: int | None
) -> Setting:
    """The cheapest with a peak of at most `budget_bytes`, and of these the first: a clock that sees
    no difference is no reason to run anything again. Without a budget, of those at most one per
    cent above the smallest.

    Raises `InfeasibleBudget` with the smallest peak where none fits.
    """
    peaks = {setting: step.peak_bytes(setting) for setting in settings}
    least_bytes = min(peaks.values())
    if budget_bytes is None:
        budget_bytes = int(NEAR_MIN * least_bytes)
    check_feasible(least_bytes, budget_bytes)
    fitting = [setting for setting, peak_bytes in peaks.items() if peak_bytes <= budget_bytes]
    return min(fitting, key=step.time_s)
