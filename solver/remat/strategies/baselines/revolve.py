"""Binomial checkpointing of a chain.

Griewank, Walther: Algorithm 799: revolve (ACM TOMS 26, 2000). With c checkpoints, the state before
the first stage among them, a chain of l stages is reversed with

    t(l, c) = r l - C(c + r, r - 1)        r the smallest with C(c + r, c) >= l

runs of a stage that only advance the state; each stage runs once more to write its tape. No
schedule with c checkpoints takes fewer, for stages of equal cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.chain import Chain, ChainScheduleWriter
from remat.strategies.baselines.schedule_builder import select_cheapest
from remat.strategies.option_types import Checked, between


@dataclass(frozen=True)
class Revolve(Checked):
    """Binomial checkpointing with `checkpoints` retained states, or the best number if that is
    None.

    Optimal for stages of equal time and size whose tape is as small as a state. Stages of networks
    are not like that: see `Rotor`.
    """

    checkpoints: Annotated[int, between(1, 1_000_000)] | None = None
    name = "revolve"

    def run(self, task: Task) -> Solution:
        """Return the cheapest number of checkpoints that fits. Raises `RematError` if the graph is
        no chain, `InfeasibleBudget` if no number fits."""
        chain = Chain.of(task.graph, strategy=self.name)
        return select_cheapest(task, self._candidates(chain), strategy=self.name)

    def _candidates(self, chain: Chain) -> Iterator[tuple[str, Schedule]]:
        length = len(chain.stages)
        checkpoint_counts = (
            range(length, 0, -1) if self.checkpoints is None else [min(self.checkpoints, length)]
        )
        splits = _splits(length, max(checkpoint_counts))
        for checkpoints in checkpoint_counts:
            writer = ChainScheduleWriter(chain)
            _reverse(writer, splits, 0, length, checkpoints)
            yield f"c={checkpoints}", writer.schedule()


def _splits(length: int, checkpoints: int) -> list[list[int]]:
    """Return how far to advance before the next checkpoint: `[c][l]` with c checkpoints for l
    stages."""
    advances = [[stages * (stages - 1) // 2 for stages in range(length + 1)]] * 2
    splits = [[0] * (length + 1)] * 2
    for c in range(2, checkpoints + 1):
        fewest, split = [0, 0], [0, 0]
        for stages in range(2, length + 1):
            count, m = min(
                (m + advances[c - 1][stages - m] + fewest[m], m) for m in range(1, stages)
            )
            fewest.append(count)
            split.append(m)
        advances.append(fewest)
        splits.append(split)
    return splits


def _reverse(
    writer: ChainScheduleWriter, splits: list[list[int]], first: int, end: int, checkpoints: int
) -> None:
    """Reverse the stages from `first` to before `end`. The state before `first` is retained, and
    one of the `checkpoints`."""
    if end - first == 1:
        writer.run_for_tape(first, retains_state=False)
        writer.backward(first)
    elif checkpoints == 1:
        for last in reversed(range(first, end)):
            _advance(writer, first, last)
            writer.run_for_tape(last, retains_state=False)
            writer.backward(last)
            if last > first:
                writer.drop(last - 1)
    else:
        middle = first + splits[checkpoints][end - first]
        _advance(writer, first, middle)
        _reverse(writer, splits, middle, end, checkpoints - 1)
        writer.drop(middle - 1)
        _reverse(writer, splits, first, middle, checkpoints)


def _advance(writer: ChainScheduleWriter, first: int, end: int) -> None:
    for number in range(first, end):
        writer.advance(number)
        if number > first:
            writer.drop(number - 1)
