"""`remat solve`, `remat sweep` and `remat compare`: plans of a measured trace for one budget, for
several budgets, and by several strategies."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.choice.step import sweep_with_offload
from remat.commands.common import command_options, files, plan_flags
from remat.commands.common.plan_flags import PlanFlags, with_plan_options
from remat.commands.common.plots import FrontierContent, check_frontier_output, write_frontier
from remat.commands.common.running import (
    ProgressLine,
    describe_incumbent,
    exit_if_interrupted,
    hint_how_to_save,
    offload_limits,
    plan_interruptibly,
    run_with_progress,
    with_costs_of_pieces,
)
from remat.commands.common.summaries import (
    JsonObject,
    frontier_table,
    plan_summary,
    require_feasible_plan,
    to_json_text,
)
from remat.compare import BUDGETS, Comparison
from remat.compare import compare as compare_all
from remat.documents.plan import SweepDocument
from remat.limits.budget import Budget
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.plan_options import COMMAND_SOLVE, COMMAND_SWEEP
from remat.progress import Cancel
from remat.report.comparison import ComparisonRow
from remat.report.report import Report
from remat.rewrite import rewrite
from remat.solve import SWEEP_BUDGETS
from remat.solve import sweep as sweep_all
from remat.strategies import Auto

_LINE_STRATEGIES = frozenset({"auto", "exact"})
"""Strategies whose plans form the line of a picture. Plans of the others are marks."""


@with_plan_options(COMMAND_SOLVE)
def solve(
    trace: command_options.TraceFile,
    flags: PlanFlags,
    output: command_options.Output = None,
    program: command_options.ProgramOutput = None,
    as_json: command_options.Json = False,
) -> None:
    """Find the schedule with the least extra time within a budget.

    With --split, operations may run in pieces, and with --offload, tensors may be offloaded:
    --program has them then, too. The costs of pieces and copies have the same source as the
    trace's costs: a data sheet, or this machine.
    """
    options = flags.read()
    files.check_outputs(output, program)
    traced = files.read_measured_trace(trace)
    (traced, plan), signum = plan_interruptibly(traced, options, is_here=False)
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


@with_plan_options(COMMAND_SWEEP)
def sweep(
    trace: command_options.TraceFile,
    flags: PlanFlags,
    budget: command_options.BudgetTexts = None,
    device: command_options.PlotDevice = None,
    output: command_options.Output = None,
    as_json: command_options.Json = False,
) -> None:
    """Solve for several budgets: the extra time of each saved byte.

    The output is .json (for `remat plot`), .csv, .svg, .html, .png or .pdf. The time limit applies
    to each budget. With --offload auto, a picture also has the plans that offload nothing; "min"
    is the smallest peak without offloading.
    """
    budgets = [*map(Budget.parse, budget or SWEEP_BUDGETS)]
    command_options.check_data_sheet_device(device)
    options = flags.read(budgets[0])
    selected_strategy = options.strategy or Auto()
    check_frontier_output(output, "a sweep")
    traced = files.read_measured_trace(trace)
    limits = offload_limits(options, traced, is_here=False)

    def work(line: ProgressLine, cancel: Cancel) -> tuple[list[Plan], list[Plan]]:
        plans_without = sweep_all(
            traced,
            budgets,
            selected_strategy,
            progress=line.on_solve_progress,
            cancel=cancel,
            on_plan=lambda plan: line.advance(),
        )
        if limits is None or cancel.is_set():
            return plans_without, []
        plans = sweep_with_offload(
            traced,
            budgets,
            selected_strategy,
            limits,
            plans_without,
            on_plan=line.advance,
            progress=line.on_solve_progress,
            cancel=cancel,
        )
        return plans, plans_without

    steps = len(budgets) * (1 if limits is None else 2)
    (plans, plans_without), signum = run_with_progress("sweep", steps, work)
    require_feasible_plan(plans, budget)
    if output is not None:
        without = [_row_without_offloading(plan) for plan in plans_without]
        content = FrontierContent(plans, str(sweep_report(plans)), without, device)
        document, rows = SweepDocument.of(plans), [plan_summary(plan) for plan in plans]
        write_frontier(output, content, document.to_json(), rows)
    if as_json:
        summary = {
            "baseline_peak_bytes": plans[0].baseline_peak_bytes,
            "baseline_time_s": plans[0].baseline_time_s,
            "plans": [plan_summary(plan) for plan in plans],
        }
        if plans_without:
            summary["plans_without_offloading"] = [plan_summary(plan) for plan in plans_without]
        files.print_json(to_json_text(summary))
    else:
        files.print_text(str(sweep_report(plans)))
    hint_how_to_save(output, as_json, "sweep", "sweep.json.gz")
    exit_if_interrupted(signum, "the part that was solved so far")


def sweep_report(plans: list[Plan]) -> Report:
    """Return a table with one line for each plan, below the peak and time of the baseline. `plans`
    must not be empty."""
    baseline = (
        f"without recomputation: peak {format_bytes(plans[0].baseline_peak_bytes)}, "
        f"time {format_seconds(plans[0].baseline_time_s)}"
    )
    return Report(baseline, frontier_table(plans))


def _row_without_offloading(plan: Plan) -> ComparisonRow[Plan]:
    """Return a plan that offloads nothing as a row of a comparison, for a point of the picture."""
    return ComparisonRow(
        strategy="without offloading",
        budget=plan.requested_budget_bytes,
        budget_bytes=plan.requested_budget_bytes,
        plan=plan,
        reason="",
        solve_s=0.0,
    )


def compare(
    trace: command_options.TraceFile,
    budget: command_options.BudgetTexts = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Names, separated by commas; by default all that suit a graph of any size.",
            autocompletion=plan_flags.complete_strategies,
            show_default=False,
        ),
    ] = None,
    gap: plan_flags.Gap = None,
    time_limit: plan_flags.TimeLimit = None,
    solver: plan_flags.Solver = None,
    device: command_options.PlotDevice = None,
    also_split: Annotated[
        bool, typer.Option("--also-split", help="Add plans whose largest operations are split.")
    ] = False,
    output: command_options.Output = None,
    as_json: command_options.Json = False,
) -> None:
    """Compare strategies: extra time and peak at several budgets.

    The output is .json, .csv, .svg, .html, .png or .pdf. Gap and time limit apply to each strategy
    and budget.
    """
    budgets = [*map(Budget.parse, budget or BUDGETS)]
    command_options.check_data_sheet_device(device)
    selected = plan_flags.strategies_to_compare(strategies, gap, time_limit, solver)
    check_frontier_output(output, "a comparison")
    trace_document = files.read_measured_trace(trace)

    def work(line: ProgressLine, cancel: Cancel) -> Comparison:
        def show_row(row: ComparisonRow[Plan]) -> None:
            line.advance()
            line.set_description(f"compare: {row.strategy} at {row.budget}")

        return compare_all(
            trace_document,
            budgets,
            selected,
            measure_pieces=with_costs_of_pieces if also_split else None,
            cancel=cancel,
            on_row=show_row,
        )

    steps = len(budgets) * (len(selected) + also_split)
    comparison, signum = run_with_progress("compare", steps, work)
    if output is not None:
        lines = [row for row in comparison.rows if row.strategy in _LINE_STRATEGIES]
        content = FrontierContent(
            [row.plan for row in lines if row.plan is not None],
            comparison.describe(),
            [row for row in comparison.rows if row not in lines],
            device,
        )
        rows = [_comparison_csv_row(row) for row in comparison.rows]
        write_frontier(output, content, to_json_text(_comparison_summary(comparison)), rows)
    if as_json:
        files.print_json(to_json_text(_comparison_summary(comparison)))
    else:
        files.print_text(comparison.describe())
    exit_if_interrupted(signum, "the part that was compared so far")


def _comparison_summary(comparison: Comparison) -> JsonObject:
    """Return a comparison as data for JSON."""
    return {
        "baseline_peak_bytes": comparison.baseline_peak_bytes,
        "baseline_time_s": comparison.baseline_time_s,
        "rows": [_comparison_row_summary(row) for row in comparison.rows],
    }


def _comparison_row_summary(row: ComparisonRow[Plan]) -> JsonObject:
    """Return a row of a comparison as data for JSON, with the numbers of its plan."""
    return {
        "strategy": row.strategy,
        "budget": row.budget,
        "budget_bytes": row.budget_bytes,
        "is_applicable": row.is_applicable,
        "reason": row.reason,
        "seconds": row.solve_s,
        "plan": None if row.plan is None else plan_summary(row.plan),
    }


def _comparison_csv_row(row: ComparisonRow[Plan]) -> JsonObject:
    """Return a row of a comparison as columns of a CSV file; the plan's columns are None without a
    plan."""
    summary = _comparison_row_summary(row)
    summary.pop("plan")
    plan = {} if row.plan is None else plan_summary(row.plan)
    columns = ("peak_bytes", "time_s", "overhead", "lower_bound", "gap", "recomputations")
    return summary | {key: plan.get(key) for key in columns}
