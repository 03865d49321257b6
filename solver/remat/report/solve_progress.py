"""How a plan was solved, step by step: `Plan.describe(solve=True)`, `remat explain --solve`."""

from __future__ import annotations

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.tables import align_columns
from remat.solution import STEP_STAT_SUFFIXES, step_names

Figures = dict[str, str | int | float]

_PEAK = ("smallest peak", "took", "peak", "at least")
_COST = ("least time", "took", "extra time", "at least")


def solve_steps(plan: PlanData) -> list[Figures]:
    """For each step of the solve in its order: its name as `step`, `seconds_s`, and what was known
    after it: `cost` and `bound`, shares of extra time, or, where the smallest peak was looked for,
    `bytes` and `bound_bytes`; `note` where it ran beside others, or failed."""
    found: list[Figures] = []
    for name in step_names(plan.stats):
        told = {fact: plan.stats.get(f"{name}_{fact}") for fact in STEP_STAT_SUFFIXES}
        facts = {fact: figure for fact, figure in told.items() if isinstance(figure, int | float)}
        if "s" in facts:
            found.append({"step": name, "seconds_s": facts.pop("s"), **_note(plan, name), **facts})
    return found


def describe_solve_steps(plan: PlanData) -> str:
    """A line for each step of the solve: its seconds, and the best and the bound after it. Steps
    for the smallest peak, whose figures are bytes, are a table before that of the least time."""
    found = solve_steps(plan)
    if not found:
        return _why_none(plan)
    costs = [step for step in found if "bound" in step]
    peaks = [step for step in found if "bound" not in step]
    tables = [[_PEAK, *map(_peak_line, peaks)], [_COST, *map(_cost_line, costs)]]
    lines: list[tuple[str, str, str, str]] = []
    for table in tables:
        if len(table) > 1:
            lines += [("", "", "", ""), *table] if lines else table
    return "\n".join(align_columns(lines))


def _note(plan: PlanData, name: str) -> Figures:
    failed = f"{name}: " in str(plan.stats.get("search_error", ""))
    notes = {"beside": f"{name}_concurrent" in plan.stats, "failed": failed}
    told = ", ".join(note for note, is_so in notes.items() if is_so)
    return {"note": told} if told else {}


def _why_none(plan: PlanData) -> str:
    if not plan.schedule.recomputed(plan.graph):
        return "no steps: all fits without recomputation, so nothing was searched for"
    strategy = plan.stats.get("strategy", "this strategy")
    return f"no steps: {strategy} finds its schedule in one go; auto and exact search step by step"


def _peak_line(step: Figures) -> tuple[str, str, str, str]:
    name, took = _begun(step)
    sizes = (step.get(fact) for fact in ("bytes", "bound_bytes"))
    found, bound = ("-" if size is None else format_bytes(float(size)) for size in sizes)
    return name.removeprefix("peak "), took, found, bound


def _cost_line(step: Figures) -> tuple[str, str, str, str]:
    shares = (step.get(fact) for fact in ("cost", "bound"))
    found, bound = ("-" if share is None else f"{float(share):+.3%}" for share in shares)
    return *_begun(step), found, bound


def _begun(step: Figures) -> tuple[str, str]:
    note = f" ({step['note']})" if "note" in step else ""
    return str(step["step"]).replace("_", " ") + note, format_seconds(float(step["seconds_s"]))
