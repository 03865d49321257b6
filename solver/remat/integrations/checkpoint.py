"""`Policies` run by `torch.utils.checkpoint` as selective activation checkpointing:

    policies = remat.emit(model, "60%", (batch,))
    remat.integrations.checkpoint.apply(model, policies)

or, if the model's own code checkpoints its blocks:

    checkpoint(block, x, use_reentrant=False, context_fn=context_fn(policies, "layers.0"))

Blocks keep their classes, parameters and hooks.
"""

from __future__ import annotations

from torch import nn

from remat.blockwise.block_step import AS_IT_IS
from remat.blockwise.policies import OPERATORS, Policies
from remat.errors import RematError, similar_names_hint
from remat.frontend.emit import operators
from remat.frontend.emit.apply_policies import AppliedPolicies, check_policy_rules
from remat.frontend.emit.operators import ContextFn

__all__ = ["apply", "context_fn"]


def apply(model: nn.Module, policies: Policies) -> AppliedPolicies:
    """Checkpoint each block of `model` by its policy, from its next call on.

    Class, parameters and `state_dict` do not change. Call `.remove()` of the returned object to
    undo it.

    Raises `TraceError` if the model does not have the blocks, and `RematError` for policies with
    other rules.
    """
    check_policy_rules(policies, OPERATORS)
    return AppliedPolicies(model, policies, operators.run_block_under_policy)


def context_fn(policies: Policies, block: str) -> ContextFn | None:
    """Return the `context_fn` of `torch.utils.checkpoint.checkpoint` for the block at the module
    path `block`; None if the block is not to be checkpointed at all.

    Raises `RematError` if there is no policy for the block, or for policies with other rules.
    """
    check_policy_rules(policies, OPERATORS)
    policy = policies.for_block(block)
    if policy is None:
        suggestion = similar_names_hint(block, [policy.block for policy in policies.blocks])
        raise RematError(f"there is no policy for a block {block!r}{suggestion}")
    return operators.context_fn(policy) if policy.how != AS_IT_IS else None
