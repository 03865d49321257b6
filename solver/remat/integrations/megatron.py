"""`Policies` as recompute options of Megatron-core (`pip install megatron-core`)::

    policies = remat.emit(model, "60%", batch, rules="megatron")
    options = remat.integrations.megatron.options(policies)

The options are for `TransformerConfig`. The model is one of Megatron-core, built without recompute
options, as one process has it: the whole model, or one pipeline stage.
"""

from __future__ import annotations

from typing import Any

from remat.blockwise.block_step import CHECKPOINTED
from remat.blockwise.policies import MEGATRON, Policies
from remat.frontend.emit.apply_policies import check_policy_rules

__all__ = ["arguments", "options"]


def options(policies: Policies) -> dict[str, Any]:
    """Return the recompute options for `TransformerConfig`; empty if nothing is recomputed.

    Raises `RematError` for policies with other rules.
    """
    check_policy_rules(policies, MEGATRON)
    checkpointed_layers: dict[str, int] = {}  # per stack of layers
    for policy in policies.blocks:
        if policy.how == CHECKPOINTED:
            stack = policy.block.rpartition(".")[0]
            checkpointed_layers[stack] = checkpointed_layers.get(stack, 0) + 1
    if checkpointed_layers:
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(checkpointed_layers.values()),
        }
    modules = sorted({name for policy in policies.blocks for name in policy.modules})
    if modules:
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def arguments(policies: Policies) -> list[str]:
    """Return the recompute options as arguments of Megatron-LM's command line. Raises `RematError`
    for policies with other rules."""
    words: list[str] = []
    for name, value in options(policies).items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words
