"""Blocks checkpointed by `torch.utils.checkpoint`, with a decision for each operator: whether its
output is saved or computed again (`create_selective_checkpoint_contexts`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from remat.blockwise.policies import AS_IT_IS, CHECKPOINTED, SELECTIVE, BlockPolicy
from remat.blockwise.saving import selections
from remat.errors import RematError
from remat.frontend.emit.recorded import candidates, recorded, saved_calls

ContextFn = Callable[[], tuple[Any, Any]]
"""What `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""


def context_fn(policy: BlockPolicy) -> ContextFn:
    """For the calls of one block."""
    if policy.how != SELECTIVE:
        return noop_context_fn
    saved = {name: frozenset(numbers) for name, numbers in policy.operators.items()}
    return partial(_contexts, saved)


def run(
    policy: BlockPolicy, module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A call of a block by its policy; `own` is its forward."""
    if policy.how == AS_IT_IS:
        return own(*args, **kwargs)
    contexts = context_fn(policy)
    return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def choices(
    block: str, module: nn.Module, forward: Callable[[], Any]
) -> list[tuple[BlockPolicy, float]]:
    """What of a block may be saved, by policies that are worth a try, each with the share of its
    forward's time that running the rest again takes."""
    operators, whole_s = recorded(forward)
    found, places = candidates(operators)
    again_s = math.fsum(ran.time_s for ran in operators) if operators else whole_s
    tried = [(BlockPolicy(block=block, how=CHECKPOINTED), again_s / whole_s)]
    for chosen in selections(found):
        calls = saved_calls(operators, [places[n] for n in chosen])
        left_s = again_s - sum(found[n].time_s for n in chosen)
        tried.append((BlockPolicy(block=block, how=SELECTIVE, operators=calls), left_s / whole_s))
    return tried


def _contexts(saved: Mapping[str, frozenset[int]]) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_Counting(saved))  # type: ignore[return-value]


class _Counting:
    """The policy function of one call of a block. torch 2.11 also asks it in the backward.

    Random numbers are replayed from the block's beginning: once one that was drawn is saved, all
    later ones are, also such as were not there when the policy was made.
    """

    def __init__(self, saved: Mapping[str, frozenset[int]]) -> None:
        self._saved = saved
        self._counts: tuple[Counter[Any], Counter[Any]] = Counter(), Counter()
        self._has_drawn = [False, False]

    def __call__(
        self, ctx: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        counts = self._counts[ctx.is_recompute]
        number = counts[func]
        counts[func] += 1
        is_saved = number in self._saved.get(str(func), ())
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            if self._has_drawn[ctx.is_recompute] and not is_saved:
                if func._schema.is_mutable:
                    raise RematError(
                        f"{func} draws random numbers behind others that are saved, and did not "
                        "when this policy was made: emit policies for the model as it runs now"
                    )
                is_saved = True
            self._has_drawn[ctx.is_recompute] |= is_saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
