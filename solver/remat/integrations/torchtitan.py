"""A memory policy for torchtitan's graph trainer, which runs a step as one graph whose nodes are
tagged as saved or recomputed:

    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    register_memory_policy("remat")(memory_policy("70GiB"))

and `--compile.memory_policy remat`.
"""

from __future__ import annotations

from remat.costs.roofline import Roofline
from remat.frontend.emit.tags import MemoryPolicy
from remat.limits.limits import INFEASIBLE_ERROR
from remat.strategies import Selective

__all__ = ["memory_policy"]


def memory_policy(
    budget: int | str,
    *,
    strategy: Selective | None = None,
    costs: Roofline | None = None,
    infeasible: str = INFEASIBLE_ERROR,
) -> MemoryPolicy:
    """Return a graph pass `(gm, *, config) -> gm` that tags forward nodes with MUST_SAVE or
    MUST_RECOMPUTE, so that the peak of the step is at most `budget`.

    `budget` is bytes, or a percentage of the peak of the step that saves everything. With
    `infeasible="smallest"`, the tags have the smallest peak if no tags fit the budget. The
    attribute `plan` of the pass is the plan of its last graph.
    """
    return MemoryPolicy(budget, strategy, costs, infeasible)
