"""`remat sweep`: the frontier of time and memory."""

from __future__ import annotations

from collections.abc import Callable

from remat.commands.common import files, options
from remat.commands.common.exits import UsageError
from remat.commands.common.figures import check_any, csv_of, frontier_table, json_of, plan_figures
from remat.commands.common.frontiers import PICTURES, Frontier
from remat.commands.common.progress_line import Line
from remat.commands.common.solving import attended, finish, hint
from remat.documents.sweep import SweepDocument
from remat.limits.budget import Budget
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.progress import Cancel
from remat.solve import SWEEP
from remat.solve import sweep as solve_all

Writer = Callable[[list[Plan], str | None], str | bytes]


def sweep(
    trace: options.TraceFile,
    budget: options.BudgetTexts = None,
    strategy: options.StrategyName = "auto",
    option: options.StrategyOptions = None,
    gap: options.Gap = None,
    time_limit: options.TimeLimit = None,
    solver: options.Solver = None,
    device: options.PictureDevice = None,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Solve for several budgets: how much time each saved byte costs.

    The output is .json (for `remat plot`), .csv, .svg, .html, .png or .pdf. A time limit is for
    each budget.
    """
    asked = [*map(Budget.parse, budget or SWEEP)]
    options.check_device(device)
    chosen = options.strategy_of(strategy, option, gap, time_limit, solver)
    files.check_outputs(output)
    if output is not None and files.suffix_of(output) not in _WRITERS:
        raise UsageError(f"{output}: a sweep is written as {', '.join(_WRITERS)}")
    traced = files.read_measured(trace)

    def work(line: Line, cancel: Cancel) -> list[Plan]:
        return solve_all(
            traced,
            asked,
            chosen,
            progress=line.solving,
            cancel=cancel,
            told=lambda plan: line.advance(),
        )

    plans, signum = attended("sweep", len(asked), work)
    check_any(plans, budget)
    if output is not None:
        files.write(output, _WRITERS[files.suffix_of(output)](plans, device))
    if as_json:
        figures = {
            "baseline_peak_bytes": plans[0].baseline_peak_bytes,
            "baseline_time_s": plans[0].baseline_time_s,
            "plans": [plan_figures(plan) for plan in plans],
        }
        files.show_json(json_of(figures))
    else:
        files.show(describe(plans))
    hint(output, as_json, "sweep", "sweep.json.gz")
    finish(signum, "what was solved so far")


def describe(plans: list[Plan]) -> str:
    """A line for each plan, under what they are relative to."""
    return (
        f"without recomputation: peak {format_bytes(plans[0].baseline_peak_bytes)}, "
        f"time {format_seconds(plans[0].baseline_time_s)}\n\n{frontier_table(plans)}"
    )


def _picture(suffix: str) -> Writer:
    return lambda plans, device: PICTURES[suffix](Frontier(plans, describe(plans), device=device))


_WRITERS: dict[str, Writer] = {
    ".json": lambda plans, device: SweepDocument.of(plans).to_json(),
    ".csv": lambda plans, device: csv_of([plan_figures(plan) for plan in plans]),
    **{suffix: _picture(suffix) for suffix in PICTURES},
}
