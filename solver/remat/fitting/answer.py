"""`answer_question`: the memory of a training loop, and all options if it does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from remat.fitting.checkpoints import checkpoint_options
from remat.fitting.plans import loss_only_options, plan_options, routing_notes
from remat.fitting.question import FitQuestion, report_stage
from remat.fitting.settings import (
    optimizer_options,
    released_output_options,
    segment_options,
)
from remat.fitting.shards import sharding_options
from remat.fitting.smaller_batches import smaller_batch_options
from remat.report.fit import ExcludedOption, Fit, FitOption

_Kind = Callable[[FitQuestion], Iterator[FitOption | ExcludedOption]]

_KINDS: dict[_Kind, str] = {
    optimizer_options: "optimizers",
    segment_options: "settings of the allocator",
    released_output_options: "released outputs",
    plan_options: "plan",
    loss_only_options: "plan that returns the loss only",
    checkpoint_options: "checkpoints",
    smaller_batch_options: "smaller batches",
    sharding_options: "several GPUs",
}
"""Kinds of options and their titles, the one that is simplest to apply first."""

_SLOW_KINDS = (smaller_batch_options, plan_options, loss_only_options)
"""Kinds of options that trace or solve, and are the last, in this order."""

_DEADLINE_NOTE = (
    "the time limit of {:g} s ended the search: with a longer one, there may be other options"
)


def answer_question(question: FitQuestion, notes: Sequence[str] = ()) -> Fit:
    """Return the answer, with options if the loop does not fit."""
    step = question.step
    report_stage(question.progress, "memory of the step", question.clock)
    memory = step.memory(question.optimizer)
    is_usable = question.is_usable(memory)
    options, excluded = ((), ()) if is_usable else find_options(question)
    deadline_notes = [_DEADLINE_NOTE.format(question.clock.limit_s)]
    return Fit(
        model=step.trace.model.rpartition(".")[2],
        device=step.trace.gpu or step.trace.device,
        optimizer=question.optimizer_name,
        batch=question.batch,
        usable_bytes=question.usable_bytes,
        memory=memory,
        step_s=step.time_s,
        options=options,
        cost_source=step.trace.cost_source,
        notes=(
            *notes,
            *routing_notes(step.trace),
            *(deadline_notes if question.clock.is_set() and not is_usable else ()),
        ),
        excluded=excluded,
    )


def search_options(question: FitQuestion) -> Iterator[tuple[_Kind, FitOption | ExcludedOption]]:
    """Yield options with their kinds until the time limit; those that take long come last."""
    kinds = [*(kind for kind in _KINDS if kind not in _SLOW_KINDS), *_SLOW_KINDS]
    for number, kind in enumerate(kinds, 1):
        if question.clock.is_set():
            return
        of_kind = question.at_stage(f"option {number} of {len(kinds)}: {_KINDS[kind]}")
        yield from ((kind, option) for option in kind(of_kind))


def find_options(
    question: FitQuestion,
) -> tuple[tuple[FitOption, ...], tuple[ExcludedOption, ...]]:
    """Return all options that apply, and the impossible ones. Those that fit come first, the
    fastest of them first, then the others, the one that exceeds the memory least first. Of options
    that are equally fast (to 0.1%), the one that is simpler to apply is first. After the time
    limit, no more options are searched for."""
    options: dict[_Kind, list[FitOption | ExcludedOption]] = {kind: [] for kind in _KINDS}
    for kind, option in search_options(question):
        options[kind].append(option)
    step_s = question.step.time_s or 1.0

    def sort_key(option: FitOption) -> tuple[bool, float]:
        if not option.fits:
            return True, option.reserved_bytes
        relative = math.inf if option.step_s is None else round(option.step_s / step_s, 3)
        return False, relative

    in_order = [option for kind in _KINDS for option in options[kind]]
    possible = [option for option in in_order if isinstance(option, FitOption)]
    excluded = [option for option in in_order if isinstance(option, ExcludedOption)]
    return tuple(sorted(possible, key=sort_key)), tuple(excluded)
