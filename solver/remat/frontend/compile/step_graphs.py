"""`StepGraphs`: which of the graphs that torch.compile compiles belong to one training step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx
from torch._guards import CompileContext

from remat.frontend.compile.graph_breaks import GraphBreak, graph_break_after
from remat.frontend.compile.registry import compiled_plans


@dataclass(eq=False)
class StepGraphs:
    """The graphs of one training step: torch.compile passes the same options object to all of them.

    Each graph is a frame of Dynamo or, under DDP, a part of one. If a frame is recompiled for other
    inputs, another step begins; the frames before it belong to that step, too, with the code that
    they have until they are recompiled.
    """

    options: object
    compilations: dict[int, object] = field(default_factory=dict[int, object])
    """The compile context of each frame, by frame id, in the order of compilation."""
    breaks: dict[int, GraphBreak] = field(default_factory=dict[int, GraphBreak])
    """The graph break after each frame that ends in one, by frame id."""


_MAX_STEPS = 64
_steps: list[StepGraphs] = []
"""The latest step of each options object; the one that was compiled last is at the end."""


def current_step(options: object, gm: fx.GraphModule) -> StepGraphs:
    """Return the step that the graph which is now compiled, `gm` of Dynamo, belongs to."""
    context = CompileContext.try_get()  # compared by identity: ids repeat after a reset of Dynamo
    frame_id = getattr(context and context.compile_id, "frame_id", None) or 0
    if not torch.is_grad_enabled():
        return StepGraphs(options)  # not a training step
    step = next((s for s in _steps if s.options is options), None) or StepGraphs(options)
    others = [s for s in _steps if s is not step]
    if step.compilations.get(frame_id, context) is not context:
        step = _step_from_frame(step, frame_id)
    step.compilations[frame_id] = context
    if place := graph_break_after(gm):
        step.breaks[frame_id] = place
    _steps[:] = [*others[1 - _MAX_STEPS :], step]
    return step


def _step_from_frame(old_step: StepGraphs, frame_id: int) -> StepGraphs:
    """Return a new step that begins with the old step's frames before this one, and move their
    plans to it."""
    frame_ids = list(old_step.compilations)
    unchanged = frame_ids[: frame_ids.index(frame_id)]
    step = StepGraphs(
        old_step.options,
        {f: old_step.compilations[f] for f in unchanged},
        {f: old_step.breaks[f] for f in unchanged if f in old_step.breaks},
    )
    for plan in compiled_plans():
        if plan.group is old_step and plan.frame_id in unchanged:
            plan.group = step
    return step
