"""A plan's text about the operations that its step runs in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from remat.graph import Split
from remat.limits.units import format_bytes
from remat.plan_data import PlanData
from remat.report.tables import fold_layer_numbers

_MAX_LINES = 6


def split_lines(plan: PlanData) -> list[str]:
    """Return a line for each kind of split, and one about the step without them; and why the logits
    are not split, if that is known."""
    reason = plan.declined.not_split
    return [*_lines(plan, plan.graph.splits), *([] if reason is None else [reason])]


def split_lines_of(plan: PlanData, ops: Sequence[int]) -> list[str]:
    """Return the lines about the splits of the modules that contain `ops`, indented."""
    pieces = [o for op in ops if (o := plan.graph.operations[op]).piece_of]
    modules = {o.module for o in pieces}
    lines = _lines(plan, [s for s in plan.graph.splits if s.module in modules])
    reason = plan.declined.not_split
    if reason and reason.split(":")[0] in {plan.graph.operations[op].module for op in ops}:
        lines.append(reason)
    return [f"  {line}" for line in lines]


def _lines(plan: PlanData, splits: Sequence[Split]) -> list[str]:
    if not splits:
        return []
    kinds: dict[tuple[str, int, int], list[Split]] = {}
    for split in splits:
        key = fold_layer_numbers(split.module or split.seed), split.rows, split.pieces
        kinds.setdefault(key, []).append(split)
    texts = [_kind_text(*kind, alike) for kind, alike in kinds.items()]
    if len(texts) > _MAX_LINES:
        texts[_MAX_LINES:] = [f"{len(texts) - _MAX_LINES} more kinds"]
    unsplit = _unsplit_text(plan)
    return [*texts, f"without splitting: {unsplit}"] if unsplit else texts


def _kind_text(module: str, rows: int, pieces: int, alike: Sequence[Split]) -> str:
    """Return the text about the splits of one module, or of the modules of that name in all
    layers."""
    size_bytes = max(split.split_bytes for split in alike)
    places = f" in each of {len(alike)} places" if len(alike) > 1 else ""
    return (
        f"{module} x {pieces}: {_rows_text(rows, pieces)} at a time; "
        f"{format_bytes(size_bytes)} of tensors exist only in pieces{places}"
    )


def _rows_text(rows: int, pieces: int) -> str:
    small, larger = divmod(rows, pieces)
    return f"{small:,} or {small + 1:,} rows" if larger else f"{small:,} rows"


def _unsplit_text(plan: PlanData) -> str:
    """Return what is known of the step's best plan before the splits, or ""."""
    if plan.split is None:
        return ""
    smallest, bound = plan.split.unsplit_min_bytes, plan.split.unsplit_bound
    if smallest is not None:
        share = smallest / plan.baseline_peak_bytes
        return f"the smallest peak known is {format_bytes(smallest)} ({share:.1%})"
    return "" if bound is None else f"{bound:+.3%} extra time at least"
