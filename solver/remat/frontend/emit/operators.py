"""Blocks under `torch.utils.checkpoint`, with a decision for each operator call: its output is
saved or recomputed (`create_selective_checkpoint_contexts`)."""

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

from remat.blockwise.block_step import AS_IT_IS, CHECKPOINTED, SELECTIVE
from remat.blockwise.choose import selections_to_save
from remat.blockwise.policies import BlockPolicy
from remat.errors import RematError
from remat.frontend.emit.operator_profile import (
    profile_operators,
    saved_calls_by_operator,
    saving_candidates,
)

ContextFn = Callable[[], tuple[Any, Any]]
"""The `context_fn` argument of `torch.utils.checkpoint.checkpoint`."""


def context_fn(policy: BlockPolicy) -> ContextFn:
    """Return the `context_fn` with which `torch.utils.checkpoint` follows a block's policy: torch's
    default unless the policy is selective."""
    if policy.how != SELECTIVE:
        return noop_context_fn
    saved_calls = {name: frozenset(indices) for name, indices in policy.operators.items()}
    return partial(_selective_contexts, saved_calls)


def run_block_under_policy(
    policy: BlockPolicy,
    module: nn.Module,
    original_forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block under its policy with `torch.utils.checkpoint`, or as it is."""
    if policy.how == AS_IT_IS:
        return original_forward(*args, **kwargs)
    contexts = context_fn(policy)
    return checkpoint(original_forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def candidate_policies(
    block: str, module: nn.Module, forward: Callable[[], Any]
) -> list[tuple[BlockPolicy, float]]:
    """Return the policies of a block that are worth a trial, each with the fraction of the
    forward's time that the recomputation takes."""
    operators, forward_s = profile_operators(forward)
    candidates, indices = saving_candidates(operators)
    recompute_s = math.fsum(call.time_s for call in operators) if operators else forward_s
    policies = [(BlockPolicy(block=block, how=CHECKPOINTED), recompute_s / forward_s)]
    for selection in selections_to_save(candidates):
        calls = saved_calls_by_operator(operators, [indices[n] for n in selection])
        remaining_s = recompute_s - sum(candidates[n].time_s for n in selection)
        policy = BlockPolicy(block=block, how=SELECTIVE, operators=calls)
        policies.append((policy, remaining_s / forward_s))
    return policies


def _selective_contexts(saved_calls: Mapping[str, frozenset[int]]) -> tuple[Any, Any]:
    """Return the forward and recomputation contexts of one call of a block, which save these calls
    of each operator."""
    return create_selective_checkpoint_contexts(_CallCountingPolicy(saved_calls))  # type: ignore[return-value]


class _CallCountingPolicy:
    """The policy function of one call of a block: it saves operator calls by their index.

    torch 2.11 calls it in the backward, too. Random numbers are replayed from the start of the
    block: once the output of a random operator is saved, those of all later ones are saved, also of
    operators that did not run when the policy was made.
    """

    def __init__(self, saved_calls: Mapping[str, frozenset[int]]) -> None:
        self._saved_calls = saved_calls
        self._call_counts: tuple[Counter[Any], Counter[Any]] = Counter(), Counter()
        self._has_saved_random = [False, False]
        """For the forward and the recomputation, as the call counts."""

    def __call__(
        self, ctx: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        call_counts = self._call_counts[ctx.is_recompute]
        call_index = call_counts[func]
        call_counts[func] += 1
        is_saved = call_index in self._saved_calls.get(str(func), ())
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            if self._has_saved_random[ctx.is_recompute] and not is_saved:
                if func._schema.is_mutable:
                    raise RematError(
                        f"{func} writes random numbers in place after a random operator whose "
                        "output is saved, and it did not when this policy was made: emit policies "
                        "for the model as it runs now"
                    )
                is_saved = True
            self._has_saved_random[ctx.is_recompute] |= is_saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
