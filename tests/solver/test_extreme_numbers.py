"""Sizes, costs, budgets and options at the ends of their ranges, and the arithmetic of a plan."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import hypothesis
import networkx as nx
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from tests.helpers import brute_force
from tests.helpers.graphs import chain, training_graphs, uneven_layers
from tests.helpers.laws import LAWS, peak_of

from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.graph import Graph, Operation, Value
from remat.plan import Plan, Status
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Auto, Exact, KeepAll, LpRounding, Revolve, Solution, Strategy, Task

pytestmark = pytest.mark.usefixtures("short_eviction")

EXAMPLES = min(10, int(os.environ.get("REMAT_EXAMPLES", "5")))
FEW = settings(LAWS, max_examples=10)
"""Fewer examples, for tests that solve programs."""
STRATEGIES: tuple[Strategy, ...] = (Exact(threads=1), Auto(order="off", threads=1, gap=0.0))


def scaled(graph: Graph, size: int, cost: float, more: int = 0) -> Graph:
    """Return the graph with sizes times `size`, plus `more` where they are not zero; costs times
    `cost`.

    With `more`, two inputs may no longer fit into the output that overwrote both.
    """
    sizes = [v.size_bytes * size + (more if v.size_bytes else 0) for v in graph.values]

    def fits(o: Operation) -> bool:
        return sum(sizes[v] for v in o.overwrites) <= sum(sizes[v] for v in o.outputs)

    return replace(
        graph,
        values=tuple(Value(v.name, n) for v, n in zip(graph.values, sizes, strict=True)),
        operations=tuple(
            replace(
                o,
                cost_s=o.cost_s * cost,
                workspace_bytes=o.workspace_bytes * size,
                overwrites=o.overwrites if fits(o) else (),
            )
            for o in graph.operations
        ),
        constant_bytes=graph.constant_bytes * size,
    )


def with_costs(graph: Graph, costs: list[float]) -> Graph:
    operations = zip(graph.operations, costs, strict=False)
    return replace(graph, operations=tuple(replace(o, cost_s=cost) for o, cost in operations))


def bound_s(plan: Plan) -> float:
    assert plan.lower_bound is not None
    return plan.baseline_time_s * (1 + plan.lower_bound)


def peaks(graph: Graph) -> tuple[int, int]:
    """Return the smallest peak of any schedule, and the peak without recomputation."""
    return (
        brute_force.smallest_budget(graph),
        peak_of(graph),
    )


def agree(graph: Graph, budget: int, *, rel: float = 1e-7) -> bool:
    """Check that brute force, cost and bound agree, or that all find the budget infeasible.
    Return True if the budget is feasible only with recomputation."""
    best = brute_force.cheapest(graph, budget)
    needs_recomputation = best is not None and budget < peaks(graph)[1]
    for strategy in STRATEGIES:
        if best is None:
            with pytest.raises(InfeasibleBudget) as error:
                solve(graph, budget, strategy)
            assert error.value.min_feasible_bytes is not None
            assert error.value.min_feasible_bytes > budget
            continue
        plan = solve(graph, budget, strategy)
        assert plan.peak_bytes <= budget
        assert plan.time_s >= best * (1 - 1e-12)
        assert plan.time_s <= best * (1 + rel), strategy.name
        assert bound_s(plan) <= best * (1 + rel), strategy.name
        assert plan.schedule.recomputed(graph) or not needs_recomputation
    return needs_recomputation


def test_budgets_are_exact_to_the_byte() -> None:
    cases: list[bool] = []

    @settings(LAWS, max_examples=EXAMPLES)
    @hypothesis.given(training_graphs(), st.integers(0, 50), st.integers(0, 2))
    def law(graph: Graph, power: int, more: int) -> None:
        graph = scaled(graph, 2**power, 1.0, more)
        smallest, high = peaks(graph)
        assume(smallest < high)
        for budget in {smallest - 1, smallest, (smallest + high) // 2, high - 1, high}:
            cases.append(agree(graph, budget))

    law()
    assert sum(cases) >= len(cases) / 2 >= 10


@pytest.mark.parametrize("power", [10, 30, 40, 50])
def test_one_byte_decides_which_value_is_retained(power: int) -> None:
    """Two values differ by one byte, and the budget leaves room for the smaller one only."""
    size = 2**power
    operations = (
        Operation("expensive", (), (0,), 5.0),
        Operation("cheap", (), (1,), 1.0),
        Operation("peak", (), (2,), 1.0),
        Operation("use cheap", (1,), (3,), 1.0),
        Operation("use expensive", (0,), (4,), 1.0),
    )
    sizes = (size + 1, size, size, 0, 0)
    graph = Graph(operations, tuple(Value(f"v{i}", s) for i, s in enumerate(sizes)))
    for budget, recomputation_s in (
        (3 * size + 1, 0.0),
        (3 * size, 1.0),
        (2 * size + 1, 1.0),
        (2 * size, 5.0),
        (2 * size - 1, 6.0),
    ):
        plan = solve(graph, budget, Exact(threads=1))
        assert plan.time_s == graph.total_cost_s + recomputation_s
        assert plan.peak_bytes <= budget
    with pytest.raises(InfeasibleBudget) as error:
        solve(graph, size, Exact(threads=1))
    assert error.value.min_feasible_bytes == size + 1


@pytest.mark.slow_cases("any")
@pytest.mark.parametrize("costs", [(0.0,), (0.0, 1e-12, 1e-6, 1.0, 3.0, 1e6)], ids=["free", "any"])
def test_costs_of_any_magnitude_are_optimized(costs: tuple[float, ...]) -> None:
    """A cost below 1e-6 of the total is within the solver's tolerance."""
    cases: list[bool] = []
    cost = st.sampled_from(costs)

    @FEW
    @hypothesis.given(training_graphs(), st.lists(cost, min_size=6, max_size=6), st.floats(0, 1))
    def law(graph: Graph, costs: list[float], share: float) -> None:
        cases.append(agree(with_costs(graph, costs), between(graph, share), rel=1e-5))

    law()
    assert len(cases) >= 8
    assert all(cases)


def between(graph: Graph, share: float) -> int:
    """Return a budget that is feasible only with recomputation; skip the graph where there is
    none."""
    low, high = peaks(graph)
    assume(low < high)
    return low + int(share * (high - 1 - low))


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1e6, 1e12])
def test_the_unit_of_cost_does_not_matter(unit: float) -> None:
    plan = solve(uneven_layers(4), "75%", Exact(threads=1))
    other = solve(scaled(uneven_layers(4), 1, unit), "75%", Exact(threads=1))
    assert other.overhead == pytest.approx(plan.overhead)
    assert other.time_s == pytest.approx(plan.time_s * unit)


@pytest.mark.parametrize("unit", [3, 2**20, 10**9 + 7, 2**50])
def test_the_unit_of_size_does_not_matter(unit: int) -> None:
    graph = uneven_layers(4)
    budget = int(0.75 * peak_of(graph))
    plan = solve(graph, budget, Exact(threads=1))
    other = solve(scaled(graph, unit, 1.0), budget * unit, Exact(threads=1))
    assert other.time_s == pytest.approx(plan.time_s)
    assert other.peak_bytes <= budget * unit


@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_equal_costs_are_optimized(cost: float) -> None:
    graph = chain(7, size=5, cost=cost)
    for budget in ("100%", "80%", "60%", "min"):
        for strategy in STRATEGIES:
            plan = solve(graph, budget, strategy)
            assert plan.status is Status.OPTIMAL
            assert plan.gap == pytest.approx(0, abs=1e-9)
            recomputed = sum(plan.schedule.recomputed(graph).values())
            assert plan.time_s == cost * (len(graph) + recomputed)
            assert plan.overhead == pytest.approx(recomputed / len(graph) if cost else 0)
            assert Plan.from_json(plan.to_json()) == plan
            assert "nan" not in plan.describe().lower()


ONE_OPERATION = Graph((Operation("only", (), (0,), 2.0, 3),), (Value("v", 4),), frozenset({0}), 5)
NO_OPERATION = Graph((), (), constant_bytes=5)
NO_BYTES = scaled(chain(4), 0, 1.0)


@pytest.mark.parametrize(
    ("graph", "budget", "peak_bytes", "time_s"),
    [
        (ONE_OPERATION, 12, 12, 2.0),
        (ONE_OPERATION, "min", 12, 2.0),
        (ONE_OPERATION, "100%", 12, 2.0),
        (NO_OPERATION, 5, 5, 0.0),
        (NO_BYTES, 1, 0, 8.0),
    ],
)
def test_the_smallest_graphs_are_solved(
    graph: Graph, budget: int | str, peak_bytes: int, time_s: float
) -> None:
    for strategy in (*STRATEGIES, KeepAll()):
        plan = solve(graph, budget, strategy)
        assert plan.schedule == Schedule.keep_all(graph)
        assert (plan.peak_bytes, plan.time_s, plan.overhead) == (peak_bytes, time_s, 0)
        assert Plan.from_json(plan.to_json()) == plan
        if peak_bytes:
            with pytest.raises(InfeasibleBudget) as error:
                solve(graph, peak_bytes - 1, strategy)
            assert error.value.min_feasible_bytes == peak_bytes


@pytest.mark.parametrize("budget", [2**62, 10**30, "9000000TiB"])
def test_a_huge_budget_retains_everything(budget: int | str) -> None:
    graph = uneven_layers(4)
    plan = solve(graph, budget)
    assert plan.schedule == Schedule.keep_all(graph)
    assert plan.lower_bound == plan.overhead == 0


@pytest.mark.parametrize("budget", [0, -1, 0.5, True, math.nan, math.inf, "", "8 Gib/s"])
def test_numbers_that_are_no_budget_are_refused(budget: object) -> None:
    with pytest.raises(BudgetError):
        solve(chain(2), budget)


@dataclass(frozen=True)
class Claims:
    """A strategy that retains everything and claims a bound, whatever the budget."""

    bound: float | None = None
    name: str = "claims"

    def run(self, task: Task) -> Solution:
        return Solution(Schedule.of((*range(len(task.graph)), 0)), self.bound)


def test_a_strategy_that_exceeds_the_budget_raises_an_error() -> None:
    with pytest.raises(RematError, match="bug: the schedule peaks at") as error:
        solve(chain(4), 2, Claims())
    assert not isinstance(error.value, InfeasibleBudget)


@pytest.mark.parametrize(
    ("bound", "gap"), [(None, None), (0.0, 1 / 9), (8.5, 0.5 / 9), (9.0, 0), (99.0, 0)]
)
def test_the_gap_is_relative_to_total_time(bound: float | None, gap: float | None) -> None:
    """Eight operations of a second and one recomputation; a bound is at least the time without
    any."""
    plan = solve(chain(4), "200%", Claims(bound))
    assert plan.time_s == 9
    assert plan.overhead == pytest.approx(1 / 8)
    assert plan.gap == (gap if gap is None else pytest.approx(gap))


def inference() -> Graph:
    """Return a graph without a backward, for which any order is allowed."""
    return Graph(
        (Operation("a", (), (0,), 1.0), Operation("b", (0,), (1,), 1.0)),
        (Value("x", 4), Value("y", 4)),
        frozenset({1}),
    )


def test_an_infinite_time_limit_is_allowed() -> None:
    for graph in (inference(), chain(6)):
        assert solve(graph, "100%", Auto(time_limit=math.inf)).overhead == 0


def test_sizes_that_no_float_represents_are_exact() -> None:
    size_bytes = 2**53 + 1
    graph = Graph((Operation("f", (), (0,), 1.0),), (Value("x", size_bytes),))
    assert solve(graph, "min", KeepAll()).peak_bytes == size_bytes


def test_a_relaxation_with_less_memory_gives_no_bound() -> None:
    plan = solve(chain(6), "100%", LpRounding(allowances=(0.3,)))
    assert plan.overhead > 0
    assert plan.lower_bound is None or plan.lower_bound == 0
    assert plan.status is Status.FEASIBLE


def test_more_checkpoints_than_stages_are_allowed() -> None:
    many = solve(chain(20), "100%", Revolve(1_000_000))
    assert many.schedule == solve(chain(20), "100%", Revolve(20)).schedule


def adversary() -> Graph:
    """Return a graph in which `a`, `g` and what is computed from them do not fit into memory
    together; `z` is expensive."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    sizes = {"a": 10, "u": 4, "g": 10, "h": 1, "w": 4, "z": 4, "M": 0, "T": 1}
    for name, size in sizes.items():
        cost, workspace = (100 if name == "z" else 1), (19 if name == "M" else 0)
        graph.add_node(
            name,
            size=size,
            cost=cost,
            workspace=workspace,
            result=name == "T",
            backward=name in "MT",
        )
    pairs = ("au", "gh", "aw", "hw", "uT", "wT", "zT")
    graph.add_edges_from((one, other) for one, other in pairs)
    return Graph.from_networkx(graph, order=list(sizes))


def test_the_bound_scope_order_excludes_other_orders() -> None:
    """The bound is for Checkmate's space (decision 8). A schedule outside of it, which recomputes
    in another order, is cheaper."""
    graph = adversary()
    outside_order = Schedule.of([0, 1, 2, 3, 4, 5, 6, 2, 3, 0, 1, 4, 7])
    timeline = simulate(graph, outside_order)
    assert (timeline.peak_bytes, timeline.time_s) == (23, 112)
    plan = solve(graph, 23, Exact())
    assert (plan.status, plan.bound_scope, plan.time_s) == (Status.OPTIMAL, "order", 209)
