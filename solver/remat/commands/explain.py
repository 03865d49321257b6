"""`remat explain`: a plan in words, or why it retains or recomputes operations."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.command_options import Json, PlanFile
from remat.commands.common.summaries import JsonObject, plan_summary, to_json_text
from remat.plan import Plan
from remat.report.solve_progress import describe_solve_steps, solve_steps


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
        files.print_json(
            to_json_text(summary | ({"solve": solve_steps(document)} if solve else {}))
        )
        return
    texts = [*explanations.values()] or [document.describe()]
    files.print_text("\n\n".join([*texts, describe_solve_steps(document)] if solve else texts))


def _matching_operations(plan: Plan, name: str) -> list[JsonObject]:
    """Return the operations with this name, and those of the module with this path."""
    return [
        _operation_summary(plan, op)
        for op, operation in enumerate(plan.graph.operations)
        if operation.name == name or f"{operation.module}.".startswith(f"{name}.")
    ]


def _operation_summary(plan: Plan, op: int) -> JsonObject:
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
