"""`remat solve`: the plan with the least extra time within a budget."""

from __future__ import annotations

from remat.choice.plan_request import PlanRequest
from remat.commands.common import command_options, files
from remat.commands.common.command_options import (
    check_offload_options,
    offload_limits,
    with_costs_of_pieces,
)
from remat.commands.common.interruptible_solve import (
    describe_incumbent,
    exit_if_interrupted,
    hint_how_to_save,
    plan_interruptibly,
)
from remat.limits.infeasible import INFEASIBLE_ERROR
from remat.limits.options import OFFLOAD_OFF, SPLIT_OFF
from remat.rewrite import rewrite


def solve(
    trace: command_options.TraceFile,
    budget: command_options.BudgetText,
    strategy: command_options.StrategyName = "auto",
    option: command_options.StrategyOptions = None,
    gap: command_options.Gap = None,
    time_limit: command_options.TimeLimit = None,
    solver: command_options.Solver = None,
    output: command_options.Output = None,
    program: command_options.ProgramOutput = None,
    as_json: command_options.Json = False,
    reserve: command_options.Reserve = None,
    split: command_options.Split = SPLIT_OFF,
    offload: command_options.Offload = OFFLOAD_OFF,
    host_budget: command_options.HostBudget = None,
    infeasible: command_options.Infeasible = INFEASIBLE_ERROR,
) -> None:
    """Find the schedule with the least extra time within a budget.

    With --split, operations may run in pieces, and with --offload, tensors may be offloaded:
    --program has them then, too. The costs of pieces and copies have the same source as the
    trace's costs: a data sheet, or this machine.
    """
    pieces = command_options.pieces_from_option(split)
    check_offload_options(offload, host_budget)
    command_options.check_infeasible(infeasible)
    limits = command_options.limits_from_options(budget, reserve)
    selected_strategy = command_options.strategy_from_options(
        strategy, option, gap, time_limit, solver
    )
    files.check_outputs(output, program)
    traced = files.read_measured_trace(trace)
    host_limits = offload_limits(offload, host_budget, traced, is_here=False)
    request = PlanRequest(limits, selected_strategy, pieces, host_limits, infeasible)
    (traced, plan), signum = plan_interruptibly(traced, request, with_costs_of_pieces)
    if output is not None:
        files.write_output(output, plan.to_json())
    if program is not None:
        files.write_output(program, rewrite(traced, plan.schedule).to_json())
    if as_json:
        files.print_json(plan.to_json())
    else:
        files.print_text(plan.describe())
    if program is None:
        hint_how_to_save(output, as_json, "plan", "plan.json.gz")
    exit_if_interrupted(signum, describe_incumbent(plan))
