"""`remat diff`: what a second plan does differently."""

from __future__ import annotations

from remat.commands import files
from remat.commands.figures import json_of, plan_figures
from remat.commands.options import Json, PlanFile
from remat.plan import Plan


def diff(before: PlanFile, after: PlanFile, as_json: Json = False) -> None:
    """Compare two plans: peak, time, and what is recomputed in one only."""
    files.check_one_stdin(before, after)
    first, second = files.read_plan(before), files.read_plan(after)
    if not as_json:
        files.show(first.diff(second))
        return
    mine, theirs = _recomputed(first), _recomputed(second)
    changed = [
        {
            "operation": name,
            "before_recomputations": mine.get(name, 0),
            "after_recomputations": theirs.get(name, 0),
        }
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    files.show_json(
        json_of(
            {
                "before": plan_figures(first),
                "after": plan_figures(second),
                "changed": changed,
            }
        )
    )


def _recomputed(plan: Plan) -> dict[str, int]:
    again = plan.schedule.recomputed(plan.graph)
    return {plan.graph.operations[op].name: times for op, times in again.items()}
