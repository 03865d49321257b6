"""The error for a budget that no known schedule fits."""

from __future__ import annotations

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.heuristics.peak_bounds import largest_operation
from remat.limits.budget import missing_percent_sign_hint, share_of_baseline
from remat.limits.units import format_bytes
from remat.simulate import baseline_of


def infeasible(
    graph: Graph, budget_bytes: int, smallest_bytes: int, reason: str, *, proved: bool
) -> InfeasibleBudget:
    """Return the error, for the given `reason`; `proved` means that no schedule fits."""
    baseline_bytes = baseline_of(graph).peak_bytes
    share = missing_percent_sign_hint(budget_bytes, baseline_bytes)
    smallest_share = share_of_baseline(
        smallest_bytes, baseline_bytes=baseline_bytes, library_bytes=graph.library_bytes
    )
    largest = _largest_operation_text(graph)
    verdict = "is proved infeasible" if proved else "seems to be too small"
    return InfeasibleBudget(
        f"a budget of {format_bytes(budget_bytes)} ({budget_bytes:,} bytes) {verdict}: {reason}; "
        f"the smallest peak found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes), "
        f"{smallest_share:.1%} of the peak without recomputation, {format_bytes(baseline_bytes)} "
        f"({baseline_bytes:,} bytes). Pass a budget of at least {smallest_bytes:,} bytes "
        f'or "min", or make the batch smaller{share}.{largest}',
        min_feasible_bytes=smallest_bytes,
        is_proved=proved,
    )


def _largest_operation_text(graph: Graph) -> str:
    """Return a sentence that names the operation which needs most; "" for an empty graph."""
    size_bytes, op = largest_operation(graph)
    if op is None:
        return ""
    operation = graph.operations[op]
    phase = "backward" if operation.backward else "forward"
    module = f", {operation.module}" if operation.module else ""
    return (
        f" {operation.name} ({phase}{module}) needs most of all operations: "
        f"{format_bytes(size_bytes)} with parameters and what has to be live then."
    )
