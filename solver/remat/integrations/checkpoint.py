"""`remat.Policies` run by `torch.utils.checkpoint`, as selective checkpointing:

    policies = remat.emit(model, "60%", (batch,))
    remat.integrations.checkpoint.apply(model, policies)

or, where the model's own code checkpoints its blocks:

    checkpoint(block, x, use_reentrant=False, context_fn=context_fn(policies, "layers.0"))

Blocks keep their classes, parameters and hooks.
"""

from __future__ import annotations

from torch import nn

from remat.blockwise.policies import OPERATORS, Policies
from remat.errors import RematError, nearest
from remat.frontend.emit import operators
from remat.frontend.emit.applied import Applied, check_rules
from remat.frontend.emit.operators import ContextFn

__all__ = ["apply", "context_fn"]


def apply(model: nn.Module, policies: Policies) -> Applied:
    """Have each block of `model` checkpointed by its policy, from its next call on. Class,
    parameters and `state_dict` stay as they are; `.remove()` of what is returned ends it.

    Raises `TraceError` where the model has not the blocks, `RematError` for policies under other
    rules.
    """
    check_rules(policies, OPERATORS)
    return Applied(model, policies, operators.run)


def context_fn(policies: Policies, block: str) -> ContextFn | None:
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn` for the block at this path;
    None where the block is not to be checkpointed at all. Raises `RematError`."""
    check_rules(policies, OPERATORS)
    policy = policies.of(block)
    if policy is None:
        near = nearest(block, [policy.block for policy in policies.blocks])
        raise RematError(f"there is no policy for a block {block!r}{near}")
    return operators.context_fn(policy) if policy.how != operators.AS_IT_IS else None
