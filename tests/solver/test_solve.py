"""`solve` and `sweep`: laws 2 and 4 over graphs, budgets and strategies; errors; cancel."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.helpers.graphs import chain, uneven_layers
from tests.helpers.laws import peak_of

from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.plan import Plan, Status
from remat.progress import Progress
from remat.schedule import Schedule
from remat.solution import Solution
from remat.solve import solve, sweep
from remat.strategies import Auto, KeepAll, Strategy, Task


def test_cost_falls_as_the_budget_grows() -> None:
    plans = sweep(
        uneven_layers(4), ("min", "60%", "70%", "80%", "100%"), Auto(order="off", time_limit=3)
    )
    budgets = [plan.budget_bytes for plan in plans]
    assert budgets == sorted(budgets)
    times = [plan.time_s for plan in plans]
    assert times == sorted(times, reverse=True)
    assert plans[-1].overhead == 0
    assert plans[0].peak_bytes <= plans[0].budget_bytes


def test_a_sweep_has_a_plan_for_each_feasible_budget_next_to_min() -> None:
    """The budget of the plan for "min" may be above its peak, and other budgets in between."""

    class Unproved(Auto):
        def run(self, task: Task) -> Solution:
            return replace(super().run(task), proved=False)

    graph, strategy = uneven_layers(8), Unproved(order="off", time_limit=1, peak_gap=0.3)
    (smallest,) = sweep(graph, ["min"], strategy)
    peak_bytes, budget_bytes = 352, smallest.budget_bytes
    assert peak_bytes + 1 < budget_bytes < peak_of(graph), "else there is nothing to test"
    reports: list[Plan] = []
    budgets = ["min", peak_bytes - 1, budget_bytes - 1, peak_bytes, "100%"]
    plans = sweep(graph, budgets, strategy, on_plan=reports.append)
    assert [plan.budget_bytes for plan in plans] == [
        peak_bytes, budget_bytes - 1, budget_bytes, peak_of(graph)
    ]  # fmt: skip
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    times = [plan.time_s for plan in plans]
    assert times == sorted(times, reverse=True)
    last_reports = {plan.budget_bytes: plan for plan in reports}
    assert [last_reports[plan.budget_bytes] for plan in plans] == plans


def test_an_infeasible_budget_names_a_feasible_one() -> None:
    graph = uneven_layers(4)
    with pytest.raises(InfeasibleBudget, match="smallest peak found") as error:
        solve(graph, 120)
    smallest = error.value.min_feasible_bytes
    assert smallest is not None
    assert solve(graph, smallest).peak_bytes <= smallest


def test_keep_all_fits_or_is_infeasible() -> None:
    graph = chain(4)
    assert solve(graph, "100%", KeepAll()).overhead == 0
    with pytest.raises(InfeasibleBudget) as error:
        solve(graph, "50%", KeepAll())
    assert error.value.min_feasible_bytes == peak_of(graph)


def test_a_trace_solves_like_its_graph() -> None:
    class Traced:
        cost_source = "made up"

        def graph(self) -> Graph:
            return chain(4)

    plan = solve(Traced(), "100%")
    assert plan.graph == chain(4)
    assert "made up" in plan.describe()


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    solve(uneven_layers(8), "60%", Auto(order="off", gap=0.0, time_limit=5), progress=seen.append)
    assert seen
    assert {progress.phase for progress in seen} <= {"cost", "peak"}
    assert all(progress.gap is None or progress.gap >= 0 for progress in seen)


@pytest.mark.slow
def test_progress_of_a_sweep_names_the_current_budget() -> None:
    seen: list[Progress] = []
    strategy = Auto(order="off", gap=0.0, time_limit=5)
    plans = sweep(uneven_layers(8), ["60%", "80%"], strategy, progress=seen.append)
    assert seen
    assert {now.budget_bytes for now in seen} <= {plan.budget_bytes for plan in plans}


def test_cancellation_returns_the_incumbent() -> None:
    cancel = threading.Event()
    cancel.set()
    graph = uneven_layers(12)
    plan = solve(graph, "75%", Auto(order="off", gap=0.0), cancel=cancel)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.status is Status.FEASIBLE


def test_a_cancelled_sweep_returns_the_plans_so_far() -> None:
    cancel = threading.Event()
    reports: list[Plan] = []

    def report(plan: Plan) -> None:
        reports.append(plan)
        if len(reports) == 2:
            cancel.set()

    budgets = ("75%", "85%", "95%")
    plans = sweep(uneven_layers(4), budgets, Auto(time_limit=3), cancel=cancel, on_plan=report)
    assert plans == reports
    assert len(plans) == 2


def test_a_solve_does_not_affect_the_next_one() -> None:
    graph = uneven_layers(6)
    first = solve(graph, "70%")
    assert solve(graph, "70%").schedule == first.schedule
    assert hash(first.schedule) == hash(Schedule(first.schedule.runs))


@pytest.mark.parametrize("strategy", ["exact", Auto, 3])
def test_an_object_that_is_no_strategy_is_refused_with_a_remedy(strategy: object) -> None:
    for function in (solve, sweep):
        argument = ["60%"] if function is sweep else "60%"
        with pytest.raises(ValueError, match=r"strategy is .* pass an instance, such as remat\.A"):
            function(chain(4), argument, strategy)


@pytest.mark.parametrize("strategy", [Auto(), KeepAll()], ids=["auto", "keep_all"])
def test_an_infeasible_budget_names_the_operation_that_needs_most(strategy: Strategy) -> None:
    graph = uneven_layers(4)
    operations = list(graph.operations)
    operations[3] = replace(operations[3], workspace_bytes=10**9, module="layers.1.mlp")
    with pytest.raises(InfeasibleBudget) as refused:
        solve(replace(graph, operations=tuple(operations)), 1000, strategy)
    words = f" {operations[3].name} (forward, layers.1.mlp) needs most of all operations: 954 MiB"
    assert words in str(refused.value)


def test_the_requested_gap_is_in_the_description() -> None:
    graph = uneven_layers(4)
    for strategy, words in (
        (Auto(), "optimal: proved within the requested gap of 0.5%\n"),
        (Auto(gap=0.0125), "optimal: proved within the requested gap of 1.25%\n"),
        (KeepAll(), "optimal: proved within the requested gap\n"),
    ):
        assert words in solve(graph, "100%", strategy).describe()
    plan = solve(graph, "100%", Auto(gap=0.0125))
    assert Plan.from_json(plan.to_json()).describe() == plan.describe()
