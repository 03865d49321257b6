"""The error for a budget that no known schedule fits."""

from __future__ import annotations

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.limits.budget import missing_percent_sign_hint, share_of_baseline
from remat.limits.units import format_bytes
from remat.schedule import Schedule
from remat.simulate import simulate


def infeasible(
    graph: Graph, budget_bytes: int, smallest_bytes: int, reason: str, *, proved: bool
) -> InfeasibleBudget:
    """Return the error, for the given `reason`; `proved` means that no schedule fits."""
    baseline_bytes = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    share = missing_percent_sign_hint(budget_bytes, baseline_bytes)
    smallest_share = share_of_baseline(
        smallest_bytes, baseline_bytes=baseline_bytes, library_bytes=graph.library_bytes
    )
    verdict = "is proved infeasible" if proved else "seems to be too small"
    return InfeasibleBudget(
        f"a budget of {format_bytes(budget_bytes)} ({budget_bytes:,} bytes) {verdict}: {reason}; "
        f"the smallest peak found is {format_bytes(smallest_bytes)} ({smallest_bytes:,} bytes), "
        f"{smallest_share:.1%} of the peak without recomputation, {format_bytes(baseline_bytes)} "
        f"({baseline_bytes:,} bytes). Pass a budget of at least {smallest_bytes:,} bytes "
        f'or "min", or make the batch smaller{share}.',
        min_feasible_bytes=smallest_bytes,
        is_proved=proved,
    )
