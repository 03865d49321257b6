"""`remat compare`: what every known strategy does with a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.commands import files
from remat.commands.exits import UsageError
from remat.commands.figures import Figures, csv_of, json_of, plan_figures
from remat.commands.live import Line
from remat.commands.options import (
    Budgets,
    Gap,
    Json,
    Output,
    Solver,
    TimeLimit,
    TraceFile,
    check_budgets,
    compared,
    complete_strategies,
)
from remat.commands.solving import attended, finish
from remat.compare import BUDGETS, Comparison, Row
from remat.compare import compare as compare_all
from remat.plan import Plan
from remat.progress import Cancel
from remat.view import frontier_html, frontier_svg

_OURS = frozenset({"auto", "exact"})
"""Their plans are the line of the picture; those of the others are marks."""


def compare(
    trace: TraceFile,
    budget: Budgets = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="With commas between them; by default all that suit a graph of any size.",
            autocompletion=complete_strategies,
            show_default=False,
        ),
    ] = None,
    gap: Gap = None,
    time_limit: TimeLimit = None,
    solver: Solver = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare strategies: extra time and peak of each at several budgets.

    The output is .json, .csv, .svg or .html. Limits are for each strategy and budget.
    """
    budgets = list(budget or BUDGETS)
    check_budgets(budgets)
    chosen = compared(strategies, gap, time_limit, solver)
    files.check_outputs(output)
    if output is not None and files.suffix_of(output) not in _WRITERS:
        raise UsageError(f"{output}: a comparison is written as {', '.join(_WRITERS)}")
    traced = files.read_measured(trace)

    def work(line: Line, cancel: Cancel) -> Comparison:
        def told(row: Row) -> None:
            line.advance()
            line.tell(f"compare: {row.strategy} at {row.budget}")

        return compare_all(traced, budgets, chosen, cancel=cancel, told=told)

    found, signum = attended("compare", len(budgets) * len(chosen), work)
    if output is not None:
        files.write(output, _WRITERS[files.suffix_of(output)](found))
    if as_json:
        files.show_json(json_of(_figures(found)))
    else:
        files.show(found.describe())
    finish(signum, "what was compared so far")


def _figures(found: Comparison) -> Figures:
    return {
        "baseline_peak_bytes": found.baseline_peak_bytes,
        "baseline_time_s": found.baseline_time_s,
        "rows": [_row(row) for row in found.rows],
    }


def _row(row: Row) -> Figures:
    return {
        "strategy": row.strategy,
        "budget": row.budget,
        "budget_bytes": row.budget_bytes,
        "is_applicable": row.is_applicable,
        "reason": row.reason,
        "seconds": row.seconds,
        "plan": None if row.plan is None else plan_figures(row.plan),
    }


def _flat(row: Row) -> Figures:
    figures = _row(row)
    figures.pop("plan")
    plan = {} if row.plan is None else plan_figures(row.plan)
    wanted = ("peak_bytes", "time_s", "overhead", "lower_bound", "gap", "recomputations")
    return figures | {key: plan.get(key) for key in wanted}


def _line(found: Comparison) -> list[Plan]:
    return [row.plan for row in found.rows if row.plan is not None and row.strategy in _OURS]


def _marks(found: Comparison) -> list[Row]:
    return [row for row in found.rows if row.strategy not in _OURS]


_WRITERS = {
    ".json": lambda found: json_of(_figures(found)),
    ".csv": lambda found: csv_of([_flat(row) for row in found.rows]),
    ".svg": lambda found: frontier_svg(_line(found), _marks(found)),
    ".html": lambda found: frontier_html(_line(found), _marks(found), text=found.describe()),
}
