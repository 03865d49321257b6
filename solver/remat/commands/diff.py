"""`remat diff`: what a second plan does differently."""

from __future__ import annotations

from remat.commands.common import files
from remat.commands.common.figures import json_of, plan_figures
from remat.commands.common.options import Json, PlanFile
from remat.report.describe import recomputed_by_name


def diff(before: PlanFile, after: PlanFile, as_json: Json = False) -> None:
    """Compare two plans: peak, time, and what is recomputed in one only."""
    files.check_one_stdin(before, after)
    first, second = files.read_plan(before), files.read_plan(after)
    if not as_json:
        files.show(first.diff(second))
        return
    mine, theirs = recomputed_by_name(first), recomputed_by_name(second)
    changed = [
        {
            "operation": name,
            "before_recomputations": mine.get(name, 0),
            "after_recomputations": theirs.get(name, 0),
        }
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    figures = {"before": plan_figures(first), "after": plan_figures(second), "changed": changed}
    files.show_json(json_of(figures))
