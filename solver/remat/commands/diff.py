"""`remat diff`: the differences between two plans."""

from __future__ import annotations

from remat.commands.common import files
from remat.commands.common.command_options import Json, PlanFile
from remat.commands.common.summaries import plan_summary, to_json_text
from remat.report.describe import recomputations_by_name


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
