"""The step of a graph before its operations were split: what budgets and times are relative to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.frontend.common.aliases import storage_base
from remat.frontend.compile.candidates import keep_all_bytes
from remat.frontend.compile.joint.fx_utils import node_bytes
from remat.frontend.compile.kernels.to_solver import (
    CompileProblem,
    inductor_baseline_peak_bytes,
)
from remat.frontend.compile.registry import UnsplitStep
from remat.graph import Baseline, Split
from remat.simulate import baseline_of


def unsplit_step(problem: CompileProblem) -> UnsplitStep:
    """Return the step that plain torch.compile would run: the baseline of budgets and times."""
    joint = problem.joint
    peak_bytes = inductor_baseline_peak_bytes(problem) or 0
    if joint.plain_halves is None:
        peak_bytes = max(peak_bytes, keep_all_bytes(problem.graph))
    saved = problem.retained_outputs.union(map(storage_base, joint.saved_tensors))
    return UnsplitStep(peak_bytes, sum(map(node_bytes, saved)), baseline_of(problem.graph).time_s)


def with_unsplit_step(
    problem: CompileProblem, unsplit: UnsplitStep | None, splits: Sequence[Split]
) -> CompileProblem:
    """Return the problem of a split graph, with the step that its plans are compared to."""
    assert unsplit is not None
    baseline = Baseline(unsplit.peak_bytes, unsplit.time_s)
    graph = replace(problem.graph, unsplit=baseline, splits=tuple(splits))
    return replace(problem, graph=graph)
