"""`Policies` run by torch_remat (`pip install torch_remat`), which saves chosen regions:

    policies = remat.emit(model, "60%", (batch,), rules="regions")
    remat.integrations.torch_remat.apply(model, policies)

Regions are named by their module paths. A recomputed block samples the same random numbers.
"""

from __future__ import annotations

from torch import nn

from remat.blockwise.block_step import AS_IT_IS
from remat.blockwise.policies import REGIONS, Policies
from remat.frontend.emit import regions
from remat.frontend.emit.apply_policies import AppliedPolicies, check_policy_rules

__all__ = ["apply", "save_regions"]


def apply(model: nn.Module, policies: Policies) -> AppliedPolicies:
    """Checkpoint each block of `model` by torch_remat, from its next call on.

    The modules of its policy become regions with `recompute=False`. Call `.remove()` of the
    returned object to undo it.

    Raises `TraceError` if the model does not have the blocks, and `RematError` for policies with
    other rules, or if torch_remat is not installed.
    """
    check_policy_rules(policies, REGIONS)
    regions.import_torch_remat()
    return AppliedPolicies(model, policies, regions.run_block_under_policy)


def save_regions(policies: Policies) -> dict[str, tuple[str, ...]]:
    """Return the submodules to save for each checkpointed block, by its module path, to mark the
    regions by hand. Raises `RematError` for policies with other rules."""
    check_policy_rules(policies, REGIONS)
    return {p.block: p.regions for p in policies.blocks if p.how != AS_IT_IS}
