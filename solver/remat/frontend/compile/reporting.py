"""What a compilation tells on the way: lines of the logger "remat", and how far the solve is.

Lines are of the level INFO, so they are seen with

    logging.basicConfig()
    logging.getLogger("remat").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remat.frontend.compile.registry import CompiledPlan, Lesson
from remat.limits.budget import format_bytes, format_seconds
from remat.progress import Progress, ProgressCallback
from remat.report.standing import standing

if TYPE_CHECKING:
    from remat.frontend.compile.joint.joint_graph import Joint
    from remat.frontend.compile.kernels.fusion_groups import Region
    from remat.frontend.compile.options import CompileOptions

logger = logging.getLogger("remat")

_ERASE = "\r\x1b[2K"


def begun(title: str, operations: int, options: CompileOptions, lesson: Lesson) -> None:
    """Planning starts."""
    less = f" less {format_bytes(lesson.less_bytes)}" if lesson.less_bytes else ""
    if lesson.apart:
        less += f", {len(lesson.apart)} in place no more"
    logger.info(
        "%s: planning %d operations within %s%s", title, operations, options.budget.given, less
    )


def found(title: str, joint: Joint, regions: Sequence[Region], took_s: float) -> None:
    """What is to be scheduled is known."""
    what = "operations" if joint.kernels is None else "of Inductor's kernels"
    backward = sum(region.is_backward for region in regions)
    forward = len(regions) - backward
    took = format_seconds(took_s)
    logger.info(
        "%s: %d %s in forward, %d in backward, found in %s", title, forward, what, backward, took
    )


def solved(compiled: CompiledPlan) -> None:
    """There is a plan."""
    plan = compiled.plan
    logger.info(
        "%s: solved in %s: %s instead of %s, within a budget of %s; time %+.2f%%, %d runs again",
        compiled.title,
        format_seconds(float(plan.stats.get("total_s", 0.0))),
        format_bytes(plan.peak_bytes),
        format_bytes(compiled.baseline_bytes),
        format_bytes(plan.budget_bytes),
        100 * plan.overhead,
        sum(plan.schedule.recomputed(plan.graph).values()),
    )


def verified(compiled: CompiledPlan, half: str) -> None:
    """Inductor's kernels for the plan are known."""
    of = "" if compiled.budget_bytes is None else f" of {format_bytes(compiled.budget_bytes)}"
    peak = format_bytes(compiled.verified[half])
    logger.info("%s: verified: the %s's kernels take %s%s", compiled.title, half, peak, of)


def taken(compiled: CompiledPlan) -> None:
    """Its code, and its plan, are those of an earlier process."""
    planned = format_bytes(compiled.plan.peak_bytes)
    logger.info("%s: planned before, for %s; from torch's cache", compiled.title, planned)


@dataclass(frozen=True)
class Listening:
    """Who is told how far a solve is: the function that was given; for True a line on stderr where
    that is a terminal, gone in the end; else nobody. After `limit_s` seconds, if that is given,
    nobody waits any more. All are equal: they ask for the same plan."""

    given: ProgressCallback | bool | None = field(default=None, compare=False)
    limit_s: float | None = field(default=None, compare=False)

    @contextmanager
    def heard(self) -> Iterator[ProgressCallback | None]:
        """What `remat.solve` takes."""
        if callable(self.given):
            yield self.given
        elif self.given and sys.stderr.isatty():
            try:
                yield _show
            finally:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()
        else:
            yield None


def _show(now: Progress) -> None:
    sys.stderr.write(f"{_ERASE}remat plans: {standing(now)}, {now.elapsed_s:.1f} s")
    sys.stderr.flush()
