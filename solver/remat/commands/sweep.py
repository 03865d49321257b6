"""`remat sweep`: the time/memory frontier, one plan for each of several budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from remat.choice.step import sweep_with_offload
from remat.commands.common import command_options, files
from remat.commands.common.exits import UsageError
from remat.commands.common.plan_flags import PlanFlags, with_plan_options
from remat.commands.common.plots import FRONTIER_WRITERS, FrontierContent
from remat.commands.common.running import (
    ProgressLine,
    exit_if_interrupted,
    hint_how_to_save,
    offload_limits,
    run_with_progress,
)
from remat.commands.common.summaries import (
    frontier_table,
    plan_summary,
    require_feasible_plan,
    to_csv_text,
    to_json_text,
)
from remat.documents.sweep import SweepDocument
from remat.limits.budget import Budget
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.plan_options import COMMAND_SWEEP
from remat.progress import Cancel
from remat.report.comparison import ComparisonRow
from remat.report.report import Report
from remat.solve import SWEEP_BUDGETS
from remat.solve import sweep as solve_all
from remat.strategies import Auto


@dataclass(frozen=True)
class SweepResult:
    """The plans of a sweep, and those that offload nothing: empty without `--offload auto`."""

    plans: list[Plan]
    plans_without: list[Plan]

    def rows_without_offloading(self) -> list[ComparisonRow[Plan]]:
        """Return the plans that offload nothing as points of a picture."""
        return [
            ComparisonRow(
                strategy="without offloading",
                budget=plan.budget_bytes,
                budget_bytes=plan.budget_bytes,
                plan=plan,
                reason="",
                solve_s=0.0,
            )
            for plan in self.plans_without
        ]


SweepWriter = Callable[[SweepResult, str | None], str | bytes]
"""Returns the content of an output file for a result and the name of a device, if any."""


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
    command_options.check_device(device)
    options = flags.read(budgets[0])
    selected_strategy = options.strategy or Auto()
    files.check_outputs(output)
    if output is not None and files.suffix_without_gz(output) not in _SWEEP_WRITERS:
        raise UsageError(
            f"{output}: a sweep can be written as {', '.join(_SWEEP_WRITERS)}; use one of these "
            "file name endings"
        )
    traced = files.read_measured_trace(trace)
    limits = offload_limits(options, traced, is_here=False)

    def work(line: ProgressLine, cancel: Cancel) -> SweepResult:
        plans_without = solve_all(
            traced,
            budgets,
            selected_strategy,
            progress=line.on_solve_progress,
            cancel=cancel,
            on_plan=lambda plan: line.advance(),
        )
        if limits is None or cancel.is_set():
            return SweepResult(plans_without, [])

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
        return SweepResult(plans, plans_without)

    steps = len(budgets) * (1 if limits is None else 2)
    result, signum = run_with_progress("sweep", steps, work)
    plans = result.plans
    require_feasible_plan(plans, budget)
    if output is not None:
        files.write_output(output, _SWEEP_WRITERS[files.suffix_without_gz(output)](result, device))
    if as_json:
        summary = {
            "baseline_peak_bytes": plans[0].baseline_peak_bytes,
            "baseline_time_s": plans[0].baseline_time_s,
            "plans": [plan_summary(plan) for plan in plans],
        }
        if result.plans_without:
            without = [plan_summary(plan) for plan in result.plans_without]
            summary["plans_without_offloading"] = without
        files.print_json(to_json_text(summary))
    else:
        files.print_text(str(sweep_report(plans)))
    hint_how_to_save(output, as_json, "sweep", "sweep.json.gz")
    exit_if_interrupted(signum, "the part that was solved so far")


def sweep_report(plans: list[Plan]) -> Report:
    """Return a table with one line for each plan, below the peak and time of the baseline."""
    baseline = (
        f"without recomputation: peak {format_bytes(plans[0].baseline_peak_bytes)}, "
        f"time {format_seconds(plans[0].baseline_time_s)}"
    )
    return Report(baseline, frontier_table(plans))


def _frontier_writer(suffix: str) -> SweepWriter:
    return lambda result, device: FRONTIER_WRITERS[suffix](
        FrontierContent(
            result.plans,
            str(sweep_report(result.plans)),
            result.rows_without_offloading(),
            device=device,
        )
    )


_SWEEP_WRITERS: dict[str, SweepWriter] = {
    ".json": lambda result, device: SweepDocument.of(result.plans).to_json(),
    ".csv": lambda result, device: to_csv_text([plan_summary(plan) for plan in result.plans]),
    **{suffix: _frontier_writer(suffix) for suffix in FRONTIER_WRITERS},
}
