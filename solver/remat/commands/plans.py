"""`remat explain`, `remat diff` and `remat plot`: a plan in words, how it differs from another one,
and the plan as a picture, a page, a table, a profile or code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.command_options import (
    Json,
    PlanFile,
    PlotDevice,
    check_data_sheet_device,
)
from remat.commands.common.plots import PLOT_KINDS, PlotInput, find_plot_writer
from remat.commands.common.summaries import JsonObject, plan_summary, to_json_text
from remat.plan import Plan
from remat.report.plan_report import recomputations_by_name
from remat.report.solve_progress import step_rows, steps_report


def explain(
    plan: PlanFile,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="An operation, or a module path (transformer.h.3.mlp)."
        ),
    ] = None,
    solve: Annotated[
        bool, typer.Option("--solve", help="Also show how it was solved, step by step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe a plan, or explain why operations are recomputed."""
    document = files.read_plan(plan)
    explanations = {name: document.explain(name) for name in names or ()}
    if as_json:
        operations = [
            record for name in names or () for record in _matching_operations(document, name)
        ]
        summary: JsonObject = {
            "plan": plan_summary(document),
            "operations": operations,
            "text": explanations,
        }
        files.print_json(to_json_text(summary | ({"solve": step_rows(document)} if solve else {})))
        return
    texts = [*explanations.values()] or [document.describe()]
    files.print_text("\n\n".join([*texts, str(steps_report(document))] if solve else texts))


def _matching_operations(plan: Plan, name: str) -> list[JsonObject]:
    """Return the summaries of the operations with this name, or in the module with this path."""
    return [
        _operation_summary(plan, op)
        for op, operation in enumerate(plan.graph.operations)
        if operation.name == name or f"{operation.module}.".startswith(f"{name}.")
    ]


def _operation_summary(plan: Plan, op: int) -> JsonObject:
    """Return the numbers of an operation of a plan, its runs, and when copies of its outputs are
    live."""
    graph = plan.graph
    operation = graph.operations[op]
    runs = [run for run, other in enumerate(plan.schedule.runs) if other == op]
    return {
        "operation": operation.name,
        "index": op,
        "module": operation.module,
        "backward": operation.backward,
        "recomputable": operation.recomputable,
        "cost_s": operation.cost_s,
        "workspace_bytes": operation.workspace_bytes,
        "overwrites": [graph.values[v].name for v in operation.overwrites],
        "output_bytes": sum(graph.values[v].size_bytes for v in operation.outputs),
        "runs": runs,
        "recomputations": len(runs) - 1,
        "extra_s": operation.cost_s * (len(runs) - 1),
        "copies": [
            {
                "value": graph.values[copy.value].name,
                "produced_in_run": copy.start,
                "until": copy.end,
            }
            for copy in plan.timeline().copies
            if copy.value in operation.outputs
        ],
    }


def diff(before: PlanFile, after: PlanFile, as_json: Json = False) -> None:
    """Compare two plans: peak, time, and recomputed operations."""
    files.check_one_stdin(before, after)
    first, second = files.read_plan(before), files.read_plan(after)
    if not as_json:
        files.print_text(first.diff(second))
        return
    first_counts, second_counts = recomputations_by_name(first), recomputations_by_name(second)
    changed = [
        {
            "operation": name,
            "before_recomputations": first_counts.get(name, 0),
            "after_recomputations": second_counts.get(name, 0),
        }
        for name in sorted(first_counts.keys() | second_counts.keys())
        if first_counts.get(name) != second_counts.get(name)
    ]
    summary = {"before": plan_summary(first), "after": plan_summary(second), "changed": changed}
    files.print_json(to_json_text(summary))


def _complete_plot_kind(incomplete: str) -> list[str]:
    """Complete the name of a kind of plot, for the shell."""
    return [kind for kind in PLOT_KINDS if kind.startswith(incomplete)]


def plot(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="The file of a plan or a sweep; - is stdin.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Its ending selects the kind.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help=f"{', '.join(PLOT_KINDS)}; by default selected by the file name's ending.",
            autocompletion=_complete_plot_kind,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="The trace of the plan, for kind code and for the code in a page.",
            show_default=False,
        ),
    ] = None,
    device: PlotDevice = None,
) -> None:
    """Draw a plan (.svg, .html, .png, .pdf), or export it.

    Kind chrome is for Perfetto, kind snapshot for pytorch.org/memory_viz.
    """
    files.check_one_stdin(plan, trace or "")
    check_data_sheet_device(device)
    suffix = files.suffix_without_gz(output)
    find_plot_writer(kind, suffix, is_sweep=False)  # reports a wrong kind before it reads a file
    files.check_outputs(output)
    plans = files.read_plans(plan)
    traced = None if trace is None else files.read_measured_trace(trace)
    write_plot = find_plot_writer(kind, suffix, is_sweep=len(plans) != 1)
    files.write_output(output, write_plot(PlotInput(plans, traced, device)))
