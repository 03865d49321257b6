"""`BlocksPlan`: the plan of a model whose blocks are planned separately, with its report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from remat.blockwise.block_step import PLANNED, BlockOption
from remat.limits.budget import share_of_baseline
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.report import (
    Described,
    Fact,
    Report,
    Table,
    facts_of_lines,
    fold_layer_numbers,
)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block in a training step, and the option that it runs in.

    `path` is the block's module path and `class_name` its class. `how` is "planned" (it follows
    `plan`), "as it is" (no recomputation) or "checkpointed" (recomputed as a whole). `option` has
    its time and memory, `baseline_option` those without recomputation. `unplanned_reason` says why
    the block could not be planned, if that was tried. Of the bytes that the option saves,
    `offloaded_bytes` in `offloaded_count` tensors are on the host between forward and backward.
    """

    path: str
    class_name: str
    how: str
    option: BlockOption
    baseline_option: BlockOption
    plan: Plan | None = None
    unplanned_reason: str = ""
    offloaded_count: int = 0
    offloaded_bytes: int = 0


@dataclass(frozen=True)
class BlocksPlan(Described):
    """The plan of a training step whose blocks are planned separately, within one budget.

    `calls` are the block calls in the order of the forward. Sizes are of the whole step: they
    include parameters, buffers, gradients, batch, the workspaces of libraries (`library_bytes`) and
    everything outside of blocks. Times are of the blocks only. No choice among the blocks' options
    is faster than `bound_s`. `not_whole_reason` says why the model could not be planned as a whole,
    if that was tried. `replaced` are blocks that could not be planned, so that their submodules are
    planned instead: pairs of the path and the reason. Copies of offloaded tensors take `copies_s`,
    for `waiting_s` of which the step waits; at most `host_bytes` are on the host.
    """

    budget_bytes: int
    peak_bytes: int
    baseline_bytes: int
    bound_s: float
    calls: tuple[BlockCall, ...]
    cost_source: str = "as given"
    not_whole_reason: str = ""
    replaced: tuple[tuple[str, str], ...] = ()
    library_bytes: int = 0
    waiting_s: float = 0.0
    copies_s: float = 0.0
    host_bytes: int = 0

    @property
    def time_s(self) -> float:
        """Forward and backward time of all blocks, with recomputation and waiting for copies."""
        return math.fsum((*(call.option.time_s for call in self.calls), self.waiting_s))

    @property
    def baseline_time_s(self) -> float:
        """Forward and backward time of all blocks without recomputation."""
        return math.fsum(call.baseline_option.time_s for call in self.calls)

    @property
    def overhead(self) -> float:
        """Extra time as a fraction of the blocks' time without recomputation."""
        baseline_s = self.baseline_time_s
        return self.time_s / baseline_s - 1 if baseline_s else 0.0

    @property
    def share(self) -> float:
        """The peak as the percentage that a budget would name it by, as a fraction (0.6 is "60%"),
        as `Plan.share`."""
        return share_of_baseline(
            self.peak_bytes, baseline_bytes=self.baseline_bytes, library_bytes=self.library_bytes
        )

    @property
    def unplanned(self) -> tuple[BlockCall, ...]:
        """The calls that run in eager mode, as they are or checkpointed."""
        return tuple(call for call in self.calls if call.how != PLANNED)

    def report(self) -> Report:
        """Return budget, peak, time, the blocks' options, and why blocks are unplanned."""
        on_host = ("on host",) if self.host_bytes else ()
        facts = [
            Fact("budget", format_bytes(self.budget_bytes)),
            Fact(
                "peak",
                f"{format_bytes(self.peak_bytes)}, {self.share:.1%} of "
                f"{format_bytes(self.baseline_bytes)} without recomputation",
            ),
            Fact(
                "time",
                f"{format_seconds(self.time_s)} in blocks, {100 * self.overhead:+.3g}% over "
                f"{format_seconds(self.baseline_time_s)} (costs {self.cost_source})",
            ),
            *facts_of_lines("offload", self._offload_lines()),
        ]
        heading = ("blocks", "", "calls", "saved", "of", *on_host, "extra time")
        reasons = dict.fromkeys(
            (fold_layer_numbers(c.path), c.unplanned_reason)
            for c in self.unplanned
            if c.unplanned_reason
        )
        replaced = {fold_layer_numbers(path): text for path, text in reversed(self.replaced)}
        is_whole = not self.not_whole_reason
        return Report(
            facts,
            Table([heading, *self._rows()], "llr"),
            _reasons_text("not planned:", reasons),
            _reasons_text("planned by their submodules:", sorted(replaced.items())),
            "" if is_whole else f"block by block, because {self.not_whole_reason}",
        )

    def _offload_lines(self) -> list[str]:
        """Return the lines about offloaded tensors; none if there are none."""
        if not self.host_bytes:
            return []
        count = sum(call.offloaded_count for call in self.calls)
        offloaded_bytes = sum(call.offloaded_bytes for call in self.calls)
        return [
            f"{count} tensors ({format_bytes(offloaded_bytes)}) are offloaded to the host; "
            f"at most {format_bytes(self.host_bytes)} are there at once",
            f"copies take {format_seconds(self.copies_s)}, for "
            f"{format_seconds(self.waiting_s)} of which the step waits "
            f"({self.waiting_s / (self.time_s or 1.0):.2%} of the blocks' time)",
        ]

    def _rows(self) -> Iterable[tuple[str, ...]]:
        def row_key(call: BlockCall) -> tuple[str, str, str]:
            return fold_layer_numbers(call.path), call.class_name, call.how

        for (path, name, how), group in groupby(sorted(self.calls, key=row_key), key=row_key):
            calls = list(group)
            offloaded_bytes = sum(c.offloaded_bytes for c in calls)
            saved_bytes = sum(c.option.saved_bytes for c in calls) - offloaded_bytes
            baseline_bytes = sum(c.baseline_option.saved_bytes for c in calls)
            time_s = math.fsum(c.option.time_s for c in calls)
            baseline_s = math.fsum(c.baseline_option.time_s for c in calls)
            yield (
                path,
                f"{name}, {how}",
                str(len(calls)),
                format_bytes(saved_bytes),
                format_bytes(baseline_bytes),
                *((format_bytes(offloaded_bytes),) if self.host_bytes else ()),
                f"{100 * (time_s / baseline_s - 1):+.3g}%" if baseline_s else "",
            )


def _reasons_text(title: str, reasons: Iterable[tuple[str, str]]) -> str:
    """Return the paths of modules with reasons below a title; "" without any."""
    lines = [f"  {path}: {text}" for path, text in reasons]
    return "\n".join([title, *lines]) if lines else ""
