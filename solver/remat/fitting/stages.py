"""Stages of an answer, such as "option 3 of 8: plan", in reports of its progress."""

from __future__ import annotations

from dataclasses import replace

from remat.fitting.answer_deadline import Deadline
from remat.progress import STAGE_PHASE, Progress, ProgressCallback


def report_stage(progress: ProgressCallback | None, stage: str, deadline: Deadline) -> None:
    """Report that a stage starts; no-op without a callback."""
    if progress is not None:
        progress(Progress(STAGE_PHASE, deadline.elapsed_s, stage=stage))


def in_stage(progress: ProgressCallback | None, stage: str) -> ProgressCallback | None:
    """Return a callback that adds the stage to reports, in front of a stage that they have."""
    if progress is None:
        return None

    def report_in_stage(report: Progress) -> None:
        progress(replace(report, stage=": ".join(filter(None, (stage, report.stage)))))

    return report_in_stage
