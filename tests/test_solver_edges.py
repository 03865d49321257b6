"""Options and sizes at the ends of what is allowed."""

from __future__ import annotations

import math
import time

from tests.graphs import chain

import remat
from remat.graph import Graph, Operation, Value
from remat.plan import Status
from remat.strategies import Auto, KeepAll, LpRounding, Revolve


def inference() -> Graph:
    """Without a backward, any order may be taken."""
    return Graph(
        (Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0)),
        (Value("x", 4), Value("y", 4)),
        frozenset({1}),
    )


def test_no_limit_of_time() -> None:
    for graph in (inference(), chain(6)):
        assert remat.solve(graph, "100%", Auto(time_limit=math.inf)).overhead == 0


def test_min_of_a_size_that_no_float_has() -> None:
    size_bytes = 2**53 + 1
    graph = Graph((Operation("f", (), (0,), 1.0),), (Value("x", size_bytes),))
    assert remat.solve(graph, "min", KeepAll()).peak_bytes == size_bytes


def test_a_relaxation_of_less_room_bounds_nothing() -> None:
    plan = remat.solve(chain(6), "100%", LpRounding(allowances=(0.3,)))
    assert plan.overhead > 0
    assert plan.lower_bound is None or plan.lower_bound == 0
    assert plan.status is Status.FEASIBLE


def test_more_checkpoints_than_stages() -> None:
    began = time.monotonic()
    many = remat.solve(chain(20), "100%", Revolve(1_000_000))
    assert many.schedule == remat.solve(chain(20), "100%", Revolve(20)).schedule
    assert time.monotonic() - began < 60  # seconds of work were days
