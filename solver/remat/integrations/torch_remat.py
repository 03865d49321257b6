"""`remat.Policies` run by torch_remat (`pip install torch_remat`), as regions that are saved:

    policies = remat.emit(model, "60%", (batch,), rules="regions")
    remat.integrations.torch_remat.apply(model, policies)

Names of regions are those of the modules; random numbers are the same when a block runs again.
"""

from __future__ import annotations

from torch import nn

from remat.blockwise.policies import REGIONS, Policies
from remat.frontend.emit import regions
from remat.frontend.emit.applied import Applied, check_rules

__all__ = ["apply", "save_regions"]


def apply(model: nn.Module, policies: Policies) -> Applied:
    """Have each block of `model` checkpointed by torch_remat, from its next call on, with the
    modules of its policy as regions of `recompute=False`. `.remove()` of what is returned ends it.

    Raises `TraceError` where the model has not the blocks, `RematError` for policies under other
    rules, and where torch_remat is missing.
    """
    check_rules(policies, REGIONS)
    regions.torch_remat()
    return Applied(model, policies, regions.run)


def save_regions(policies: Policies) -> dict[str, tuple[str, ...]]:
    """For each block that is checkpointed, the modules inside of it to save, for those who mark
    regions by hand."""
    check_rules(policies, REGIONS)
    return {p.block: p.regions for p in policies.blocks if p.how != regions.AS_IT_IS}
