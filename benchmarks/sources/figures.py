"""Figures of one case: eager mode, checkpoints, plans at given peaks, and the largest size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

import remat
from benchmarks.sources.cases import PublishedCase
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest
from remat.choice.step import plan_step
from remat.costs.roofline import Roofline
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.fitting.eager import EagerStep
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.progress import Clock
from remat.report.training_memory import optimizer_step_bytes

Row = dict[str, Any]

VERSION = 1
"""Raise it when the same case gives other figures: stored ones are computed once more then."""

TIME_LIMIT_S = 10.0
"""The limit of each solve; all solves of a plan together have `LIMIT_S`."""

LIMIT_S = 60.0
METHODS = ("recompute", "pieces", "offload")
"""Recomputation; also operations in pieces; also offloaded tensors."""

_MAX_FACTOR = 8
"""The largest size that is tried, relative to the published one."""

_RESOLUTION = 16
"""The largest size is found to one part of this."""


@dataclass(frozen=True)
class SizedStep:
    """The step of a case with a size, traced and with costs."""

    case: PublishedCase
    size: int

    @property
    def roofline(self) -> Roofline:
        """The costs of the case's GPU."""
        return Roofline(self.case.device.name, device=self.case.device)

    @cached_property
    def eager(self) -> EagerStep:
        """The step in eager mode."""
        with torch.device("meta"):
            model, arguments = self.case.build(self.size)
            traced = remat.trace(model.train(), (), arguments, device=self.case.traced_device)
        return EagerStep.of(remat.measure(traced, self.roofline))

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of the optimizer's state."""
        return self.eager.optimizer(self.case.optimizer).state_bytes

    @cached_property
    def update_bytes(self) -> int:
        """The bytes that are live while the optimizer updates the parameters."""
        return optimizer_step_bytes(self.eager.graph, self.eager.optimizer(self.case.optimizer))

    def eager_figures(self) -> Row:
        """Return the peak and the time of eager mode."""
        return self._figures(self.eager)

    def checkpoint_figures(self) -> Row | None:
        """Return the peak and the extra time of a checkpoint for each block, if there are any."""
        checkpointed = self.eager.with_blocks_checkpointed() if self.case.has_blocks else None
        return None if checkpointed is None else self._figures(checkpointed)

    def _figures(self, step: EagerStep) -> Row:
        return {
            "peak_bytes": max(step.peak_bytes + self.state_bytes, self.update_bytes),
            "step_s": step.time_s,
            "overhead": round(step.time_s / self.eager.time_s - 1, 4),
        }

    def plan_figures(self, peak_bytes: int, method: str) -> Row:
        """Return the figures of the fastest plan whose peak, with the optimizer, is at most that
        many bytes."""
        started_s = time.perf_counter()
        row: Row = {"method": method, "is_feasible": False}
        if self.update_bytes > peak_bytes:
            return row | {"failure": "the update of the optimizer needs more"}
        try:
            step = plan_step(
                self.eager.trace,
                PlanRequest(
                    Limits(Budget.parse(peak_bytes - self.state_bytes)),
                    remat.Auto(time_limit=TIME_LIMIT_S),
                    pieces=() if method == "recompute" else self.case.pieces,
                    offload=OffloadLimits(self.roofline.link) if method == "offload" else None,
                ),
                measure=lambda t: remat.measure(t, self.roofline),
                clock=Clock.of(LIMIT_S),
            )
        except (InfeasibleBudget, SolverTimeout) as error:
            return row | {"failure": type(error).__name__, "solve_s": _since(started_s)}
        plan = step.plan
        bound = plan.lower_bound
        return row | {
            "is_feasible": True,
            "peak_bytes": plan.peak_bytes + self.state_bytes,
            "overhead": round(plan.overhead, 4),
            "bound": None if bound is None else round(bound, 4),
            "bound_scope": plan.bound_scope,
            "pieces": [split.pieces for split in plan.graph.splits],
            "host_bytes": plan.host_bytes,
            "waiting": round(float(plan.stats.get("waiting_s", 0.0)) / plan.baseline_time_s, 4),
            "solve_s": _since(started_s),
        }


def case_figures(case: PublishedCase, report: Callable[[str], None] = print) -> Row:
    """Return all figures of a case. `report` is called with a line about each."""
    started_s = time.perf_counter()
    step = SizedStep(case, case.size)
    eager, checkpoints = step.eager_figures(), step.checkpoint_figures()
    report(f"{case.name}: eager {_gb(eager)}, checkpoints {_gb(checkpoints)}")
    goals = [
        (point.method, "published", point.peak_bytes)
        for point in case.points
        if point.peak_bytes is not None and point.extra != 0.0
    ]
    if checkpoints is not None:
        goals.append(("checkpoints", "predicted", checkpoints["peak_bytes"]))
        if case.offloaded_bytes:
            peak_bytes = checkpoints["peak_bytes"] - case.offloaded_bytes
            goals.append(("checkpoints, offloaded inputs", "predicted", peak_bytes))
    plans: list[Row] = []
    for name, kind, peak_bytes in goals:
        for method in METHODS:
            row = {"at": name, "kind": kind, "at_bytes": peak_bytes}
            plans.append(row | step.plan_figures(peak_bytes, method))
            report(f"{case.name}: {_plan_line(plans[-1])}")
    return {
        "case": case.name,
        "fingerprint": case.fingerprint,
        "version": VERSION,
        "operations": len(step.eager.trace.operations),
        "eager": eager,
        "checkpoints": checkpoints,
        "copies_s": _copies_s(case),
        "plans": plans,
        "largest": _largest_figures(step, plans, report),
        "seconds": _since(started_s),
    }


def _copies_s(case: PublishedCase) -> float:
    """Return the seconds of copies of offloaded inputs to the host and back, one after another."""
    link = case.device.link
    rates = link.to_host_bytes_per_s, link.to_device_bytes_per_s
    return sum(case.offloaded_bytes / rate for rate in rates)


def _largest_figures(
    step: SizedStep, plans: list[Row], report: Callable[[str], None]
) -> Row | None:
    """Return the largest sizes within the published peak of the checkpoints: of a checkpoint for
    each block, and of plans with pieces that take no more extra time. `plans` has those of the
    published size."""
    case, limit_bytes = step.case, step.case.checkpoint_bytes
    within = [row for row in plans if row["at_bytes"] == limit_bytes]
    plan = next((row for row in within if row["method"] == "pieces"), None)
    if not case.size_step or limit_bytes is None or plan is None:
        return None

    @cache
    def step_of(size: int) -> SizedStep:
        return step if size == case.size else SizedStep(case, size)

    def with_checkpoints(size: int) -> Row | None:
        row = step_of(size).checkpoint_figures()
        return row if row is not None and row["peak_bytes"] <= limit_bytes else None

    by_checkpoints = largest_size(with_checkpoints, case.size, case.size_step)
    most = math.inf if by_checkpoints is None else by_checkpoints["overhead"]

    def with_plan(size: int) -> Row | None:
        row = plan if size == case.size else step_of(size).plan_figures(limit_bytes, "pieces")
        report(f"{case.name}, size {size}: {_plan_line(row)}")
        return row if row["is_feasible"] and row["overhead"] <= most else None

    return {
        "limit_bytes": limit_bytes,
        "checkpoints": by_checkpoints,
        "as_fast": largest_size(with_plan, case.size, case.size_step),
    }


def largest_size(fit: Callable[[int], Row | None], size: int, step: int) -> Row | None:
    """Return the row of the largest size that fits, with its `size`, to one part of 16; None if
    none up to `size` does. `fit` returns None for a size that does not fit. The row has the
    smallest size that did not fit as well, `too_large`: None if 8 times `size` fits."""
    low, high, row = 0, size, None
    while (fitting := fit(high)) is not None:
        low, row = high, {"size": high, "too_large": None, **fitting}
        if high >= _MAX_FACTOR * size:
            return row
        high *= 2
    while high - low > max(step, low // _RESOLUTION):
        middle = max(low + step, (low + high) // 2 // step * step)
        fitting = fit(middle)
        if fitting is None:
            high = middle
        else:
            low, row = middle, {"size": middle, **fitting}
    return None if row is None else {**row, "too_large": high}


def _since(started_s: float) -> float:
    return round(time.perf_counter() - started_s, 1)


def _gb(row: Row | None) -> str:
    if row is None:
        return "none"
    return f"{row['peak_bytes'] / 1e9:.2f} GB, +{100 * row['overhead']:.1f}%"


def _plan_line(row: Row) -> str:
    at = f"{row['at']} {row['at_bytes'] / 1e9:.2f} GB, " if "at" in row else ""
    if not row["is_feasible"]:
        return f"{at}{row['method']}: {row['failure']} ({row.get('solve_s', 0):.0f} s)"
    bound = "" if row["bound"] is None else f", bound {100 * row['bound']:.1f}%"
    figures = f"+{100 * row['overhead']:.1f}%{bound}, pieces {row['pieces']}"
    return f"{at}{row['method']}: {figures} ({row['solve_s']:.0f} s)"
