"""Laws 2, 4 and 5 on random graphs, budgets and every strategy.

REMAT_EXAMPLES is the number of graphs. Above the default, other graphs are sampled in every run.
"""

from __future__ import annotations

import os
from itertools import pairwise

import hypothesis
import pytest
from hypothesis import Phase, settings
from tests.helpers import brute_force, laws
from tests.helpers.case_counts import Tally
from tests.helpers.graphs import tight_cases
from tests.helpers.strategies import QUICK

from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.graph import Graph
from remat.plan import Plan, Status
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve, sweep
from remat.strategies import (
    Auto,
    CheckmateMilp,
    Exact,
    LpRounding,
    Strategy,
    Task,
)

pytestmark = pytest.mark.usefixtures("short_eviction")

DEFAULT = 6
EXAMPLES = int(os.environ.get("REMAT_EXAMPLES", str(DEFAULT)))
LAWS = settings(
    laws.LAWS,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    max_examples=EXAMPLES,
    derandomize=EXAMPLES <= DEFAULT,
)
NEAR = Auto(order="off", threads=1, complete_slots=0)
"""A strategy with few slots, mostly too few on graphs of a dozen operations: its programs prove
nothing about the order."""

BASELINES: tuple[Strategy, ...] = (Auto(order="off", threads=1), NEAR, *QUICK)
BEGINNERS: tuple[Strategy, ...] = (NEAR, Auto(order="on", threads=1, time_limit=1.0))
"""Strategies that start from an incumbent."""

SLOW: tuple[Strategy, ...] = (LpRounding(samples=2, threads=1), CheckmateMilp(threads=1))
"""Strategies that are tried only on graphs of up to 5 operations."""

EXACT = Exact(threads=1)
GAPS = {"auto": NEAR.gap}
"""Gaps other than 0, by the strategy's name."""

ROUNDING = 1e-7
"""The relative rounding error of solvers."""


def plan_of(graph: Graph, budget: int | str, strategy: Strategy) -> Plan | None:
    """Return the strategy's plan, checked; None where it has none, for a reason that it states."""
    try:
        plan = solve(graph, budget, strategy)
    except InfeasibleBudget as error:
        infeasible_budget_error: RematError = error
    except BudgetError:
        raise
    except RematError as error:
        infeasible_budget_error = error
    else:
        check(graph, plan)
        return plan
    if isinstance(infeasible_budget_error, InfeasibleBudget):
        smallest = infeasible_budget_error.min_feasible_bytes
        assert smallest is None or isinstance(budget, str) or smallest > budget, strategy.name
    else:
        assert "use" in str(infeasible_budget_error), strategy.name
    return None


def check(graph: Graph, plan: Plan) -> None:
    """Check law 2, the numbers of a plan, and its round trip."""
    name = plan.stats["strategy"]
    timeline = simulate(graph, plan.schedule)
    assert timeline.peak_bytes == plan.peak_bytes <= plan.budget_bytes, name
    assert timeline.time_s == plan.time_s >= plan.baseline_time_s, name
    if plan.lower_bound is not None:
        assert 0 <= plan.lower_bound <= plan.overhead, name
    if plan.gap is not None and plan.lower_bound is not None and plan.time_s > 0:
        bound_s = plan.baseline_time_s * (1 + plan.lower_bound)
        assert plan.gap == pytest.approx((plan.time_s - bound_s) / plan.time_s, abs=1e-9), name
    decoded = Plan.from_json(plan.to_json())
    assert decoded == plan
    assert decoded.to_json() == plan.to_json()


def smallest_plan(graph: Graph) -> Plan | None:
    """Return the plan for the smallest budget of any schedule; None if that is no budget (no
    value has bytes)."""
    try:
        plan = plan_of(graph, "min", EXACT)
    except BudgetError:
        return None
    assert plan is not None
    return plan


def test_exact_finds_the_optimum_of_brute_force() -> None:
    """The cheapest schedule and the smallest peak; it proves that nothing fits less memory."""
    tally = Tally()

    @settings(LAWS, max_examples=min(30, max(15, EXAMPLES)))
    @hypothesis.given(tight_cases())
    def law(case: tuple[Graph, int]) -> None:
        graph, budget = case
        low = brute_force.smallest_budget(graph)
        smallest = smallest_plan(graph)
        if smallest is None:
            return
        assert smallest.peak_bytes == low
        assert smallest.time_s == pytest.approx(brute_force.cheapest(graph, low), abs=1e-6)
        optimum = brute_force.cheapest(graph, budget)
        plan = plan_of(graph, budget, EXACT)
        tally.add(plan)
        assert (plan is None) == (optimum is None) == (budget < low)
        if plan is not None:
            assert plan.status is Status.OPTIMAL
            assert plan.time_s == pytest.approx(optimum, rel=ROUNDING, abs=1e-9)
            assert plan.gap == pytest.approx(0, abs=1e-6)
        for limit in {low - 1, min(budget, low - 1)} - {0}:
            with pytest.raises(InfeasibleBudget) as error:
                solve(graph, limit, EXACT)
            assert error.value.min_feasible_bytes == low
            assert error.value.is_proved

    law()
    tally.check()


def test_no_strategy_beats_brute_force_on_small_graphs() -> None:
    """No strategy beats the optimum of brute force, and no bound of the order exceeds it."""

    @LAWS
    @hypothesis.given(tight_cases())
    def law(case: tuple[Graph, int]) -> None:
        graph, budget = case
        low = brute_force.smallest_budget(graph)
        for strategy in (*BASELINES, *(SLOW if len(graph) <= 5 else ())):
            for limit in (budget, "min") if low else ():
                plan = plan_of(graph, limit, strategy)
                if plan is None:
                    continue
                assert plan.peak_bytes >= low, strategy.name
                best = brute_force.cheapest(graph, plan.budget_bytes)
                assert best is not None
                check_claims(plan, best)

    law()


@pytest.mark.slow
@settings(LAWS, max_examples=min(30, max(15, EXAMPLES)))
@hypothesis.given(tight_cases(max_operations=6))
def test_recomputing_in_any_order_is_never_more_expensive(case: tuple[Graph, int]) -> None:
    """Recomputing in any order, any number of times, is never more expensive than in the graph's
    order, and no plan for any order of first runs is cheaper than that."""
    graph, budget = case
    ordered = brute_force.cheapest(graph, budget)
    free = brute_force.cheapest(graph, budget, free=True)
    assert brute_force.smallest_budget(graph, free=True) <= brute_force.smallest_budget(graph)
    if ordered is None:
        return
    assert free is not None
    assert graph.total_cost_s <= free <= ordered
    assert solve(graph, budget, EXACT).time_s >= free - 1e-6


def check_claims(plan: Plan, optimum_s: float) -> None:
    """Check law 4: a plan's bound and status against the shortest time of any schedule of the
    order."""
    name = plan.stats["strategy"]
    assert plan.time_s >= optimum_s * (1 - ROUNDING), name
    if plan.lower_bound is not None and plan.bound_scope != "slots":
        bound_s = plan.baseline_time_s * (1 + plan.lower_bound)
        assert bound_s <= optimum_s * (1 + ROUNDING), name
    if plan.status is Status.OPTIMAL:
        assert plan.bound_scope != "slots", name
        assert plan.gap is not None, name
        assert plan.gap <= GAPS.get(str(name), 0.0) + ROUNDING, name


def test_no_strategy_beats_exact_on_larger_graphs() -> None:
    tally = Tally()

    @settings(LAWS, max_examples=max(2, EXAMPLES // 4))
    @hypothesis.given(tight_cases(max_operations=12, max_values=16))
    def law(case: tuple[Graph, int]) -> None:
        graph, budget = case
        smallest = smallest_plan(graph)
        if smallest is None:
            return
        exact = plan_of(graph, budget, EXACT)
        tally.add(exact)
        assert (exact is None) == (budget < smallest.peak_bytes)
        if exact is not None:
            assert exact.status is Status.OPTIMAL
            assert exact.bound_scope in ("order", "all orders")
        for strategy in BASELINES:
            plan = plan_of(graph, budget, strategy)
            if plan is None:
                continue
            assert exact is not None, strategy.name
            assert plan.peak_bytes >= smallest.peak_bytes, strategy.name
            check_claims(plan, exact.time_s)
        for strategy in BEGINNERS:
            if exact is None:
                continue
            schedule = strategy.run(Task(graph, budget, exact.schedule)).schedule
            assert simulate(graph, schedule).peak_bytes <= budget
            assert simulate(graph, schedule).time_s <= exact.time_s, "an incumbent is lost"

    law()
    tally.check()


@pytest.mark.slow
def test_cost_falls_as_the_budget_grows() -> None:
    tally = Tally()

    @LAWS
    @hypothesis.given(tight_cases())
    def law(case: tuple[Graph, int]) -> None:
        graph, _ = case
        smallest = smallest_plan(graph)
        if smallest is None:
            return
        low, high = smallest.peak_bytes, smallest.baseline_peak_bytes
        budgets = sorted({max(1, low + step * (high - low) // 4) for step in range(5)})
        solved_separately = [plan_of(graph, budget, EXACT) for budget in budgets]
        for plan in solved_separately:
            tally.add(plan)
        costs = [plan.time_s for plan in solved_separately if plan is not None]
        assert len(costs) == len(budgets)
        for dearer, cheaper in pairwise(costs):
            assert cheaper <= dearer * (1 + ROUNDING)
        swept = sweep(graph, budgets, EXACT)
        assert [plan.budget_bytes for plan in swept] == budgets
        assert [plan.time_s for plan in swept] == pytest.approx(costs, rel=ROUNDING, abs=1e-9)
        assert simulate(graph, Schedule.keep_all(graph)).time_s == costs[-1]

    law()
    tally.check()
