"""Common parts of laws over random graphs: settings, and budgets as shares of a peak."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from remat.graph import Graph
from remat.schedule import Schedule
from remat.simulate import peak_and_time

LAWS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)
"""The same examples in every run, however long they take."""


def peak_of(graph: Graph, schedule: Schedule | None = None) -> int:
    """Return the peak of a schedule; by default, without recomputation."""
    return peak_and_time(graph, schedule or Schedule.keep_all(graph))[0]


def part_of_peak(graph: Graph, share: float) -> int:
    """Return a budget: a share of the peak without recomputation, at least one byte."""
    return max(1, int(share * peak_of(graph)))


def time_of(graph: Graph, schedule: Schedule) -> float:
    """Return the time of a schedule."""
    return peak_and_time(graph, schedule)[1]
