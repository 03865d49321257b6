"""Plans made by hand, without a solver: ordinary, random and with hostile names."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.helpers.graphs import chain, small_graphs

from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution

SVG = "{http://www.w3.org/2000/svg}"


HOSTILE = (
    "<script>alert(1)</script>",
    "\" onload=\"alert(1)' x='",
    "two\nlines\r\x85of\u2028text",
    "</title></svg><b>",
    "nul\x00 esc\x1b lone\ud800 turn\u202e",
    "]]> --> &amp; &#60; %s {0}",
    "=HYPERLINK(1)",
)


def plan_of(graph: Graph, schedule: Schedule, budget_bytes: int | None = None) -> Plan:
    """Return a plan without a solver and without a bound."""
    peak = simulate(graph, schedule).peak_bytes
    return Plan.of(graph, max(budget_bytes or peak, 1), Solution(schedule), {})


def half_recomputed(length: int) -> Plan:
    """Return a plan of a chain that recomputes every other forward operation right before its
    backward reads it."""
    graph = chain(length, size=1 << 20, cost=1e-4)
    runs = list(range(length))
    for step, i in enumerate(reversed(range(length))):
        runs += [i, length + step] if i % 2 else [length + step]
    return plan_of(graph, Schedule.of(runs))


def hostile_plan() -> Plan:
    """Return a plan whose operations, values and modules have hostile names, one of them
    recomputed."""
    count = len(HOSTILE)
    values = tuple(Value(name, 1 << 10) for name in HOSTILE)
    operations = tuple(
        Operation(
            name, (i - 1,) if i else (), (i,), 0.5, module=f"{HOSTILE[-1 - i]}.m", backward=i > 3
        )
        for i, name in enumerate(HOSTILE)
    )
    graph = Graph(operations, values, results=frozenset({count - 1}))
    return plan_of(graph, Schedule.of([*range(count - 1), count - 2, 0, count - 1]))


@st.composite
def plans(draw_from: st.DrawFn) -> Plan:
    """Plans of small graphs with recomputations anywhere after the first run."""
    graph = draw_from(small_graphs(renews=False))
    runs = list(range(len(graph)))
    recomputable = [op for op in runs if graph.operations[op].recomputable]
    for op in (
        draw_from(st.lists(st.sampled_from(recomputable), max_size=6)) if recomputable else []
    ):
        runs.insert(draw_from(st.integers(runs.index(op) + 1, len(runs))), op)
    return plan_of(graph, Schedule.of(runs))


def one_operation_graph() -> Graph:
    """Return a plan of a graph of one operation."""
    return Graph((Operation("only", (), (0,), 1.0),), (Value("v", 4),), frozenset({0}))
