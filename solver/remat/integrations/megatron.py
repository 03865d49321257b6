"""`remat.Policies` as options of Megatron-core (`pip install megatron-core`), for its
`TransformerConfig`::

    policies = remat.emit(model, "60%", batch, rules="megatron")
    options = remat.integrations.megatron.options(policies)

The model is one of Megatron-core without options of recomputation, as one process has it: whole, or
a stage of a pipeline.
"""

from __future__ import annotations

from typing import Any

from remat.blockwise.policies import CHECKPOINTED, MEGATRON, Policies
from remat.frontend.emit.applied import check_rules

__all__ = ["arguments", "options"]


def options(policies: Policies) -> dict[str, Any]:
    """What to give `TransformerConfig`; nothing where all is saved.

    Raises `RematError` for policies under other rules.
    """
    check_rules(policies, MEGATRON)
    stacks: dict[str, int] = {}
    for policy in policies.blocks:
        if policy.how == CHECKPOINTED:
            stack = policy.block.rpartition(".")[0]
            stacks[stack] = stacks.get(stack, 0) + 1
    if stacks:
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(stacks.values()),
        }
    modules = sorted({name for policy in policies.blocks for name in policy.modules})
    if modules:
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def arguments(policies: Policies) -> list[str]:
    """The same as arguments of Megatron-LM's command line."""
    found: list[str] = []
    for name, value in options(policies).items():
        values = value if isinstance(value, list) else [value]
        found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found
