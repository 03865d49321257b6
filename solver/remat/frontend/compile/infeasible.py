"""The error for a budget that no plan of a compiled graph fits: one figure, the smallest feasible
budget, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from remat.errors import InfeasibleBudget, RematError
from remat.frontend.compile.compat import cause_of_type, without_frames
from remat.graph import Graph
from remat.limits.budget import missing_percent_sign_hint
from remat.limits.limits import Limits
from remat.limits.units import format_bytes
from remat.report.describe import describe_peak
from remat.solve import solve
from remat.strategies import Auto

_SMALLEST_PEAK_TIME_S = 2.0
"""Time for finding a small schedule whose peak the error describes."""


def no_plan_fits(
    limits: Limits,
    baseline_bytes: int,
    min_feasible_bytes: int,
    *,
    is_proved: bool,
    has_kernels: bool,
) -> InfeasibleBudget:
    """Return the error that names `min_feasible_bytes` as the smallest budget. For a percentage,
    `baseline_bytes` is the peak that it is relative to.

    With kernels, a proof is about those that remat plans with: Inductor may make others, which need
    less. Without, operations run as planned.
    """
    budget = limits.budget
    smallest = f"{min_feasible_bytes:,} bytes"
    if budget.share is not None:
        percent = math.ceil(100 * min_feasible_bytes / max(1, baseline_bytes))
        smallest += f' ("{percent}%")'
    external_bytes = limits.external_bytes + limits.reserve_bytes
    if external_bytes and budget.size_bytes is not None:
        smallest += f", of which {format_bytes(external_bytes)} are used outside this graph"
    hint = missing_percent_sign_hint(budget.size_bytes or 101, baseline_bytes)
    subject = "the kernels that remat plans with" if has_kernels else "the operations"
    proof = f" This is proved of {subject}, in their order." if is_proved else ""
    return InfeasibleBudget(
        f"no plan fits the budget {budget.requested!r}. Pass a budget of at least {smallest}, or "
        f'"min", or make the batch smaller{hint}.{proof}',
        min_feasible_bytes=min_feasible_bytes,
        is_proved=is_proved and not has_kernels,
    )


@contextmanager
def explain_infeasible(graph: Graph, title: str, hint: str = "") -> Iterator[None]:
    """Add the graph's title, the peak of a small schedule in words, and a hint, if there is one, to
    an `InfeasibleBudget` that is raised inside of this context."""
    try:
        yield
    except InfeasibleBudget as error:
        explanation = ""
        with suppress(RematError):
            schedule = solve(graph, "min", Auto(time_limit=_SMALLEST_PEAK_TIME_S)).schedule
            explanation = f" At the smallest, {describe_peak(graph, schedule)}."
        explained = InfeasibleBudget(
            f"{title}: {error}{explanation}",
            min_feasible_bytes=error.min_feasible_bytes,
            is_proved=error.is_proved,
        )
        raise (explained.with_hint(hint) if hint else explained) from error


@contextmanager
def add_hints(*hints: str) -> Iterator[None]:
    """Raise an `InfeasibleBudget` of this context in place of torch's exception that wraps it. The
    non-empty hints are sentences at its end."""
    try:
        yield
    except Exception as error:
        infeasible = cause_of_type(error, InfeasibleBudget)
        if infeasible is None:
            raise
        for hint in filter(None, hints):
            infeasible = infeasible.with_hint(hint)
        raise without_frames(infeasible) from None
