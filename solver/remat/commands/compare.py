"""`remat compare`: extra time and peak of several strategies on one trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from remat.commands.common import command_options, files, plan_flags
from remat.commands.common.exits import UsageError
from remat.commands.common.plots import FRONTIER_WRITERS, FrontierContent
from remat.commands.common.running import (
    ProgressLine,
    exit_if_interrupted,
    run_with_progress,
    with_costs_of_pieces,
)
from remat.commands.common.summaries import JsonObject, plan_summary, to_csv_text, to_json_text
from remat.compare import BUDGETS, Comparison
from remat.compare import compare as compare_all
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel
from remat.report.comparison import ComparisonRow

ComparisonWriter = Callable[[Comparison, str | None], str | bytes]
"""Returns the content of an output file for a comparison and the name of a device, if any."""

_LINE_STRATEGIES = frozenset({"auto", "exact"})
"""Strategies whose plans form the line of the picture. Plans of the others are marks."""


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
    command_options.check_device(device)
    selected = plan_flags.strategies_to_compare(strategies, gap, time_limit, solver)
    files.check_outputs(output)
    if output is not None and files.suffix_without_gz(output) not in _COMPARISON_WRITERS:
        raise UsageError(
            f"{output}: a comparison can be written as {', '.join(_COMPARISON_WRITERS)}; use one "
            "of these file name endings"
        )
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
        files.write_output(
            output, _COMPARISON_WRITERS[files.suffix_without_gz(output)](comparison, device)
        )
    if as_json:
        files.print_json(to_json_text(_summary(comparison)))
    else:
        files.print_text(comparison.describe())
    exit_if_interrupted(signum, "the part that was compared so far")


def _summary(comparison: Comparison) -> JsonObject:
    return {
        "baseline_peak_bytes": comparison.baseline_peak_bytes,
        "baseline_time_s": comparison.baseline_time_s,
        "rows": [_row_summary(row) for row in comparison.rows],
    }


def _row_summary(row: ComparisonRow[Plan]) -> JsonObject:
    return {
        "strategy": row.strategy,
        "budget": row.budget,
        "budget_bytes": row.budget_bytes,
        "is_applicable": row.is_applicable,
        "reason": row.reason,
        "seconds": row.solve_s,
        "plan": None if row.plan is None else plan_summary(row.plan),
    }


def _csv_row(row: ComparisonRow[Plan]) -> JsonObject:
    summary = _row_summary(row)
    summary.pop("plan")
    plan = {} if row.plan is None else plan_summary(row.plan)
    columns = ("peak_bytes", "time_s", "overhead", "lower_bound", "gap", "recomputations")
    return summary | {key: plan.get(key) for key in columns}


def _frontier_content(comparison: Comparison, device: str | None) -> FrontierContent:
    return FrontierContent(
        plans=[
            r.plan for r in comparison.rows if r.plan is not None and r.strategy in _LINE_STRATEGIES
        ],
        rows=[row for row in comparison.rows if row.strategy not in _LINE_STRATEGIES],
        text=comparison.describe(),
        device=device,
    )


def _frontier_writer(suffix: str) -> ComparisonWriter:
    return lambda comparison, device: FRONTIER_WRITERS[suffix](
        _frontier_content(comparison, device)
    )


_COMPARISON_WRITERS: dict[str, ComparisonWriter] = {
    ".json": lambda comparison, device: to_json_text(_summary(comparison)),
    ".csv": lambda comparison, device: to_csv_text([_csv_row(row) for row in comparison.rows]),
    **{suffix: _frontier_writer(suffix) for suffix in FRONTIER_WRITERS},
}
