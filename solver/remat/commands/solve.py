"""`remat solve`: the cheapest plan within a budget."""

from __future__ import annotations

from remat.commands.common import files, options
from remat.commands.common.solving import best_so_far, finish, hint, solved
from remat.plan_data import with_reserve_stat
from remat.rewrite import rewrite


def solve(
    trace: options.TraceFile,
    budget: options.BudgetText,
    strategy: options.StrategyName = "auto",
    option: options.StrategyOptions = None,
    gap: options.Gap = None,
    time_limit: options.TimeLimit = None,
    solver: options.Solver = None,
    output: options.Output = None,
    program: options.ProgramOutput = None,
    as_json: options.Json = False,
    reserve: options.Reserve = None,
) -> None:
    """Find the schedule with the least extra time whose peak is within the budget."""
    limits = options.limits_of(budget, reserve)
    chosen = options.strategy_of(strategy, option, gap, time_limit, solver)
    files.check_outputs(output, program)
    traced = files.read_measured(trace)
    with limits.infeasible_with_reserve():
        plan, signum = solved(traced, limits.budget_after_reserve, chosen)
    plan = with_reserve_stat(plan, limits.reserve_bytes)
    if output is not None:
        files.write(output, plan.to_json())
    if program is not None:
        files.write(program, rewrite(traced, plan.schedule).to_json())
    if as_json:
        files.show_json(plan.to_json())
    else:
        files.show(plan.describe())
    if program is None:
        hint(output, as_json, "plan", "plan.json.gz")
    finish(signum, best_so_far(plan))
