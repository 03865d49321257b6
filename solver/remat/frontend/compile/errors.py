"""An `InfeasibleBudget` of a compiled graph says which graph it is, and what holds the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from remat.errors import InfeasibleBudget, RematError
from remat.graph import Graph
from remat.report.holding import held_at_peak
from remat.solve import solve
from remat.strategies import Auto

_LOOK_S = 2.0


@contextmanager
def explained(graph: Graph, title: str) -> Iterator[None]:
    """Within it, the error has the name of the graph and the peak of a small schedule in words."""
    try:
        yield
    except InfeasibleBudget as error:
        held = ""
        with suppress(RematError):
            schedule = solve(graph, "min", Auto(time_limit=_LOOK_S)).schedule
            held = f" At the smallest, {held_at_peak(graph, schedule)}."
        raise InfeasibleBudget(
            f"{title}: {error}{held}",
            min_feasible_bytes=error.min_feasible_bytes,
            is_proved=error.is_proved,
        ) from error
