"""`remat compare`: what every known strategy does with a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from remat.commands.common import files, options
from remat.commands.common.exits import UsageError
from remat.commands.common.figures import Figures, csv_of, json_of, plan_figures
from remat.commands.common.frontiers import PICTURES, Frontier
from remat.commands.common.progress_line import Line
from remat.commands.common.solving import attended, finish
from remat.compare import BUDGETS, Comparison
from remat.compare import compare as compare_all
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel
from remat.report.comparison import Row

Writer = Callable[[Comparison, str | None], str | bytes]

_OURS = frozenset({"auto", "exact"})
"""Their plans are the line of the picture; those of the others are marks."""


def compare(
    trace: options.TraceFile,
    budget: options.BudgetTexts = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="With commas between them; by default all that suit a graph of any size.",
            autocompletion=options.complete_strategies,
            show_default=False,
        ),
    ] = None,
    gap: options.Gap = None,
    time_limit: options.TimeLimit = None,
    solver: options.Solver = None,
    device: options.PictureDevice = None,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Compare strategies: extra time and peak of each at several budgets.

    The output is .json, .csv, .svg, .html, .png or .pdf. Limits are for each strategy and budget.
    """
    budgets = [*map(Budget.parse, budget or BUDGETS)]
    options.check_device(device)
    chosen = options.compared(strategies, gap, time_limit, solver)
    files.check_outputs(output)
    if output is not None and files.suffix_of(output) not in _WRITERS:
        raise UsageError(f"{output}: a comparison is written as {', '.join(_WRITERS)}")
    traced = files.read_measured(trace)

    def work(line: Line, cancel: Cancel) -> Comparison:
        def told(row: Row[Plan]) -> None:
            line.advance()
            line.tell(f"compare: {row.strategy} at {row.budget}")

        return compare_all(traced, budgets, chosen, cancel=cancel, told=told)

    found, signum = attended("compare", len(budgets) * len(chosen), work)
    if output is not None:
        files.write(output, _WRITERS[files.suffix_of(output)](found, device))
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


def _row(row: Row[Plan]) -> Figures:
    return {
        "strategy": row.strategy,
        "budget": row.budget,
        "budget_bytes": row.budget_bytes,
        "is_applicable": row.is_applicable,
        "reason": row.reason,
        "seconds": row.seconds,
        "plan": None if row.plan is None else plan_figures(row.plan),
    }


def _flat(row: Row[Plan]) -> Figures:
    figures = _row(row)
    figures.pop("plan")
    plan = {} if row.plan is None else plan_figures(row.plan)
    wanted = ("peak_bytes", "time_s", "overhead", "lower_bound", "gap", "recomputations")
    return figures | {key: plan.get(key) for key in wanted}


def _frontier(found: Comparison, device: str | None) -> Frontier:
    return Frontier(
        plans=[r.plan for r in found.rows if r.plan is not None and r.strategy in _OURS],
        rows=[row for row in found.rows if row.strategy not in _OURS],
        text=found.describe(),
        device=device,
    )


def _picture(suffix: str) -> Writer:
    return lambda found, device: PICTURES[suffix](_frontier(found, device))


_WRITERS: dict[str, Writer] = {
    ".json": lambda found, device: json_of(_figures(found)),
    ".csv": lambda found, device: csv_of([_flat(row) for row in found.rows]),
    **{suffix: _picture(suffix) for suffix in PICTURES},
}
