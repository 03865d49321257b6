"""`BlocksPlan`: what runs how, where a model is planned block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from remat.blockwise.step import Way
from remat.limits.budget import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.tables import aligned, starred

PLANNED = "planned"
AS_IT_IS = "as it is"
CHECKPOINTED = "checkpointed"


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block in a step. `how` is "planned" (by `plan`), "as it is" or "checkpointed";
    `why` says why it could not be planned, if that was tried."""

    name: str
    kind: str
    how: str
    way: Way
    kept: Way
    """As the block runs without recomputation."""
    plan: Plan | None = None
    why: str = ""


@dataclass(frozen=True)
class BlocksPlan:
    """The calls of a step's blocks in the order of the forward, with the peak of the whole step.

    Sizes are bytes, with parameters, buffers, gradients, batch and all that is outside of blocks.
    Times are of the blocks alone, in seconds. No choice of the ways that were found for each block
    takes less than `bound_s`. `why` says what kept the model from being planned as a whole, if that
    was tried.
    """

    budget_bytes: int
    peak_bytes: int
    baseline_bytes: int
    bound_s: float
    calls: tuple[BlockCall, ...]
    cost_source: str = "as given"
    why: str = ""

    @property
    def time_s(self) -> float:
        """Of all blocks, forward and backward, with what is computed again."""
        return math.fsum(call.way.time_s for call in self.calls)

    @property
    def baseline_time_s(self) -> float:
        """The same without recomputation."""
        return math.fsum(call.kept.time_s for call in self.calls)

    @property
    def overhead(self) -> float:
        """Extra time, as a share of the blocks' time without recomputation."""
        baseline_s = self.baseline_time_s
        return self.time_s / baseline_s - 1 if baseline_s else 0.0

    @property
    def unplanned(self) -> tuple[BlockCall, ...]:
        """The calls that are left to eager mode."""
        return tuple(call for call in self.calls if call.how != PLANNED)

    def describe(self) -> str:
        """A table: budget, peak and time, what is planned, what is not and why."""
        share = f"{self.peak_bytes / max(self.baseline_bytes, 1):.1%}"
        lines = [
            f"budget  {format_bytes(self.budget_bytes)}",
            f"peak    {format_bytes(self.peak_bytes)}, {share} of "
            f"{format_bytes(self.baseline_bytes)} without recomputation",
            f"time    {format_seconds(self.time_s)} in blocks, {100 * self.overhead:+.3g}% over "
            f"{format_seconds(self.baseline_time_s)} (costs {self.cost_source})",
            "",
            *aligned([("blocks", "", "calls", "saved", "of", "extra time"), *self._rows()], left=2),
        ]
        reasons = dict.fromkeys((starred(c.name), c.why) for c in self.unplanned if c.why)
        if reasons:
            lines += ["", "not planned:", *(f"  {name}: {why}" for name, why in reasons)]
        if self.why:
            lines += ["", f"block by block, because {self.why}"]
        return "\n".join(lines)

    def _rows(self) -> Iterable[tuple[str, ...]]:
        def group(call: BlockCall) -> tuple[str, str, str]:
            return starred(call.name), call.kind, call.how

        for (name, kind, how), found in groupby(sorted(self.calls, key=group), key=group):
            calls = list(found)
            saved = sum(c.way.saved_bytes for c in calls)
            kept = sum(c.kept.saved_bytes for c in calls)
            time_s = math.fsum(c.way.time_s for c in calls)
            kept_s = math.fsum(c.kept.time_s for c in calls)
            extra = f"{100 * (time_s / kept_s - 1):+.3g}%" if kept_s else ""
            yield (
                name, f"{kind}, {how}", str(len(calls)), format_bytes(saved), format_bytes(kept),
                extra,
            )  # fmt: skip

    def __str__(self) -> str:
        return self.describe()
