"""torchtitan's graph trainer, which runs a step as one graph with tags on what is saved:

    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    register_memory_policy("remat")(memory_policy("70GiB"))

and `--compile.memory_policy remat`.
"""

from __future__ import annotations

from remat.costs.roofline import Roofline
from remat.frontend.emit.tags import MemoryPolicy
from remat.strategies import Selective

__all__ = ["memory_policy"]


def memory_policy(
    budget: int | str,
    *,
    strategy: Selective | None = None,
    costs: Roofline | None = None,
) -> MemoryPolicy:
    """A pass `(gm, *, config) -> gm` that tags forward nodes with MUST_SAVE or MUST_RECOMPUTE, so
    that the step takes at most `budget`; bytes, or a percentage of the step that saves everything.
    The plan of the last graph is its `plan`.
    """
    return MemoryPolicy(budget, strategy, costs)
