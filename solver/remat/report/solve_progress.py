"""The progress of a running solve, and the steps of a finished one, as text.

The steps are part of `Plan.describe(solve=True)` and `remat explain --solve`.
"""

from __future__ import annotations

from dataclasses import replace

from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.progress import STAGE_PHASE, Progress
from remat.report.report import Report, Table
from remat.solution import STEP_STAT_SUFFIXES, step_names

Figures = dict[str, str | int | float]

_PEAK_HEADINGS = ("smallest peak", "took", "peak", "at least")
_COST_HEADINGS = ("least time", "took", "extra time", "at least")


def format_progress(progress: Progress) -> str:
    """Return the stage, incumbent, lower bound and gap of a running solve as text; what is unknown
    is left out."""
    if progress.stage:
        figures = [format_progress(replace(progress, stage=""))]
        return ": ".join([progress.stage, *(figures if progress.phase != STAGE_PHASE else [])])
    if progress.phase == "peak":
        parts = [
            "smallest peak",
            "" if progress.incumbent is None else format_bytes(progress.incumbent),
            "" if progress.bound is None else f"at least {format_bytes(progress.bound)}",
        ]
    else:
        parts = [
            "extra time",
            "" if progress.incumbent is None else f"{progress.incumbent:+.2%}",
            "" if progress.bound is None else f"at least {progress.bound:+.2%}",
        ]
    if progress.gap is not None:
        parts.append(f"gap {progress.gap:.2%}")
    return " ".join(parts[:2]) + "".join(f", {part}" for part in parts[2:] if part)


def step_rows(plan: PlanData) -> list[Figures]:
    """Return the steps of a plan's solve in order, as data.

    Each has its name as `step`, `seconds_s`, and the state after it: `cost` and `bound`, which are
    overheads, or, in a search for the smallest peak, `bytes` and `bound_bytes`. `note` says if the
    step ran concurrently with others, or failed.
    """
    rows: list[Figures] = []
    for name in step_names(plan.solve):
        stats = {suffix: plan.solve.get(f"{name}_{suffix}") for suffix in STEP_STAT_SUFFIXES}
        figures = {key: value for key, value in stats.items() if isinstance(value, int | float)}
        if "s" in figures:
            seconds_s = figures.pop("s")
            rows.append({"step": name, "seconds_s": seconds_s, **_step_note(plan, name), **figures})
    return rows


def steps_report(plan: PlanData) -> Report:
    """Return a table of the steps of a plan's solve: the seconds of each, and the incumbent and
    lower bound after it. Steps that search the smallest peak, in bytes, are a first table."""
    steps = step_rows(plan)
    if not steps:
        return Report(_why_no_steps(plan))
    peaks = [_peak_step_row(step) for step in steps if "bound" not in step]
    costs = [_cost_step_row(step) for step in steps if "bound" in step]
    peak_rows = [_PEAK_HEADINGS, *peaks] if peaks else []
    cost_rows = [_COST_HEADINGS, *costs] if costs else []
    between = [("", "", "", "")] if peaks and costs else []
    return Report(Table([*peak_rows, *between, *cost_rows]))


def _step_note(plan: PlanData, name: str) -> Figures:
    """Return `{"note": ...}` for a step that ran concurrently or failed; otherwise nothing."""
    is_failed = f"{name}: " in str(plan.solve.get("search_error", ""))
    flags = {"concurrent": f"{name}_concurrent" in plan.solve, "failed": is_failed}
    note = ", ".join(flag for flag, is_set in flags.items() if is_set)
    return {"note": note} if note else {}


def _why_no_steps(plan: PlanData) -> str:
    """Return the text for a plan whose solve had no steps."""
    if not plan.schedule.recomputed(plan.graph):
        return "no steps: everything fits without recomputation, so there was no search"
    strategy = plan.solve.get("strategy", "this strategy")
    return f"no steps: {strategy} computes its schedule directly; auto and exact search in steps"


def _peak_step_row(step: Figures) -> tuple[str, str, str, str]:
    """Return the table row of a step that searches the smallest peak."""
    name, duration = _step_name_and_duration(step)
    sizes = (step.get(key) for key in ("bytes", "bound_bytes"))
    peak, bound = ("-" if size is None else format_bytes(float(size)) for size in sizes)
    return name.removeprefix("peak "), duration, peak, bound


def _cost_step_row(step: Figures) -> tuple[str, str, str, str]:
    """Return the table row of a step that searches the least time."""
    shares = (step.get(key) for key in ("cost", "bound"))
    overhead, bound = ("-" if share is None else f"{float(share):+.3%}" for share in shares)
    return *_step_name_and_duration(step), overhead, bound


def _step_name_and_duration(step: Figures) -> tuple[str, str]:
    """Return the name of a step with its note, and its seconds as text."""
    note = f" ({step['note']})" if "note" in step else ""
    return str(step["step"]).replace("_", " ") + note, format_seconds(float(step["seconds_s"]))
