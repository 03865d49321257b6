"""`remat explain`: a plan in words, or why it keeps or recomputes operations."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.figures import Figures, json_of, plan_figures
from remat.commands.common.options import Json, PlanFile
from remat.plan import Plan
from remat.report.solving import describe_steps, steps


def explain(
    plan: PlanFile,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="An operation, or a module's path (transformer.h.3.mlp)."
        ),
    ] = None,
    solve: Annotated[
        bool, typer.Option("--solve", help="Tell also how it was solved, step by step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tell what a plan does: its table, or why operations are kept or recomputed."""
    found = files.read_plan(plan)
    told = {name: found.explain(name) for name in names or ()}
    if as_json:
        operations = [each for name in told for each in _operations(found, name)]
        figures: Figures = {"plan": plan_figures(found), "operations": operations, "text": told}
        files.show_json(json_of(figures | ({"solve": steps(found)} if solve else {})))
        return
    texts = [*told.values()] or [found.describe()]
    files.show("\n\n".join([*texts, describe_steps(found)] if solve else texts))


def _operations(plan: Plan, name: str) -> list[Figures]:
    """Those called so, and those within a module called so."""
    return [
        _figures(plan, op)
        for op, operation in enumerate(plan.graph.operations)
        if operation.name == name or f"{operation.module}.".startswith(f"{name}.")
    ]


def _figures(plan: Plan, op: int) -> Figures:
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
            {"value": graph.values[copy.value].name, "made_in_run": copy.start, "until": copy.end}
            for copy in plan.timeline().copies
            if copy.value in operation.outputs
        ],
    }
