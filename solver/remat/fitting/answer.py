"""`answer_question`: the memory of a training loop, and all options if it does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from remat.fitting.checkpoints import checkpoint_options
from remat.fitting.plans import plan_options
from remat.fitting.question import FitQuestion
from remat.fitting.routing import routing_notes
from remat.fitting.settings import optimizer_options, segment_options
from remat.fitting.shards import sharding_options
from remat.fitting.smaller_batches import smaller_batch_options
from remat.report.fit import Fit, FitOption

_KINDS = (
    optimizer_options,
    segment_options,
    plan_options,
    checkpoint_options,
    smaller_batch_options,
    sharding_options,
)
"""Kinds of options, the one that is simplest to apply first."""


def answer_question(question: FitQuestion, notes: Sequence[str] = ()) -> Fit:
    """Return the answer, with options if the loop does not fit."""
    step = question.step
    memory = step.memory(question.optimizer)
    return Fit(
        model=step.trace.model.rpartition(".")[2],
        device=step.trace.gpu or step.trace.device,
        optimizer=question.optimizer_name,
        batch=question.batch,
        usable_bytes=question.usable_bytes,
        memory=memory,
        step_s=step.time_s,
        options=() if question.is_usable(memory) else find_options(question),
        cost_source=step.trace.cost_source,
        notes=(*notes, *routing_notes(step.trace)),
    )


def find_options(question: FitQuestion) -> tuple[FitOption, ...]:
    """Return all options that apply: those that fit first, the fastest first. Of options that are
    equally fast (to 0.1%), the one that is simpler to apply is first."""
    step_s = question.step.time_s or 1.0

    def sort_key(option: FitOption) -> tuple[bool, float]:
        relative = math.inf if option.step_s is None else round(option.step_s / step_s, 3)
        return not option.fits, relative

    return tuple(sorted(chain.from_iterable(kind(question) for kind in _KINDS), key=sort_key))
