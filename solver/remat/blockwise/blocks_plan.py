"""`BlocksPlan`: the plan of a model whose blocks are planned separately."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from remat.blockwise.block_step import PLANNED
from remat.blockwise.step_graph import BlockCall
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.report.report import Report, Table, fold_layer_numbers


@dataclass(frozen=True, repr=False)
class BlocksPlan(Plan):
    """The plan of a training step whose blocks are planned separately, within one budget.

    `calls` are the block calls in the order of the forward. Sizes are of the whole step: they
    include parameters, buffers, gradients, batch, the workspaces of libraries and everything
    outside of blocks, which the graph has as memory only. Times are of the blocks only. The bound
    is of the choice among the blocks' options. `not_whole_reason` says why the model could not be
    planned as a whole, if that was tried. `replaced` are blocks that could not be planned, so that
    their submodules are planned instead: pairs of the path and the reason.
    """

    calls: tuple[BlockCall, ...] = ()
    not_whole_reason: str = ""
    replaced: tuple[tuple[str, str], ...] = ()

    @property
    def unplanned(self) -> tuple[BlockCall, ...]:
        """The calls that run in eager mode, as they are or checkpointed."""
        return tuple(call for call in self.calls if call.how != PLANNED)

    def report(self, solve: bool = False) -> Report:
        """Return the report of a plan with the blocks' options, and why blocks are unplanned."""
        on_host = ("on host",) if self.host_bytes else ()
        heading = ("blocks", "", "calls", "saved", "of", *on_host, "extra time")
        reasons = dict.fromkeys(
            (fold_layer_numbers(c.path), c.unplanned_reason)
            for c in self.unplanned
            if c.unplanned_reason
        )
        replaced = {fold_layer_numbers(path): text for path, text in reversed(self.replaced)}
        is_whole = not self.not_whole_reason
        return Report(
            *super().report(solve).parts,
            Table([heading, *self._block_rows()], "llr"),
            _reasons_text("not planned:", reasons),
            _reasons_text("planned by their submodules:", sorted(replaced.items())),
            "" if is_whole else f"block by block, because {self.not_whole_reason}",
        )

    def _block_rows(self) -> Iterable[tuple[str, ...]]:
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
