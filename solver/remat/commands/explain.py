"""`remat explain`: a plan in words, or what it does with some operations."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated

import typer

from remat.commands import files
from remat.commands.figures import Figures, json_of, plan_figures
from remat.commands.options import Json, PlanFile
from remat.errors import RematError
from remat.plan import Plan


def explain(
    plan: PlanFile,
    operations: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATION]...", help="By name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what a plan does: its table, or why operations are kept or recomputed."""
    found = files.read_plan(plan)
    names = operations or []
    _check(found, names)
    if as_json:
        told = [_operation(found, name) for name in names]
        files.show_json(json_of({"plan": plan_figures(found), "operations": told}))
    else:
        files.show("\n".join(map(found.explain, names)) or found.describe())


def _check(plan: Plan, names: Sequence[str]) -> None:
    known = {operation.name for operation in plan.graph.operations}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise RematError(f"no operation of this plan is called {name!r}{hint}")


def _operation(plan: Plan, name: str) -> Figures:
    graph = plan.graph
    op = next(i for i, operation in enumerate(graph.operations) if operation.name == name)
    operation = graph.operations[op]
    runs = [run for run, other in enumerate(plan.schedule.runs) if other == op]
    return {
        "operation": name,
        "index": op,
        "module": operation.module,
        "backward": operation.backward,
        "recomputable": operation.recomputable,
        "cost_s": operation.cost_s,
        "workspace_bytes": operation.workspace_bytes,
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
