"""Inductor, held to the kernels that were planned.

It makes kernels in two steps, and both would undo a plan: while it lowers, it writes what reads
cheaply into its readers instead of into memory, which keeps what that reads alive longer; and then
it fuses what reads the same, which runs it together. So a tensor that was planned to be written is
marked (`materialize` lowers to nothing but that it is), and only what belongs to the same run of
the schedule may become one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from remat.frontend.compile.inductor.compat import SchedulerPass

RUN = "remat_run"
"""In `meta`: the plan that a node belongs to, and the run of its schedule, both by number."""

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("materialize(Tensor x, bool apart=False) -> Tensor")


def _eager(x: torch.Tensor, apart: bool = False) -> torch.Tensor:
    return x.clone()


def _fake(x: torch.Tensor, apart: bool = False) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


_library.impl("materialize", _eager, "CompositeExplicitAutograd")
torch.library.register_fake("remat::materialize", _fake, lib=_library)

materialize = torch.ops.remat.materialize.default
"""The same tensor, written to memory: with `apart`, of its own. Inductor writes the parts of a
concatenation into the whole where it may still choose their layouts, and then a part that something
else reads keeps all of it alive."""


@register_lowering(materialize, type_promotion_kind=None)
def _realized(x: Any, apart: bool = False) -> Any:
    x.realize()
    if apart:
        buffer: Any = V.graph.try_get_buffer(x.get_name())
        if buffer is not None:  # else it is what was given, which stays where it is
            buffer.decide_layout()
    return x


class PlannedKernels(InductorChoices):
    """Inductor's own choices, but that no kernel has parts of two runs. Graphs without a plan are
    compiled as ever."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether they may become one kernel."""
        one, other = runs_of(node1), runs_of(node2)
        if (one or other) and one.isdisjoint(other):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        """For Inductor's cache."""
        return "remat: one kernel has parts of one run of the schedule"


class Holding(SchedulerPass):
    """Sees to it that graphs with a plan are held to it, just before Inductor fuses: a thread keeps
    the choices that it compiled its first graph with, whatever options say later."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if not isinstance(V.choices, PlannedKernels) and any(map(runs_of, nodes)):
            V.set_choices_handler(PlannedKernels())
        return nodes

    def uuid(self) -> str:
        """For Inductor's cache."""
        return PlannedKernels().uuid()


def runs_of(node: Any) -> frozenset[tuple[int, int]]:
    """The runs that a scheduler's node has parts of, with their plans."""
    found: set[tuple[int, int]] = set()
    for part in node.get_nodes():
        for origin in getattr(part.node, "origins", None) or ():
            if RUN in origin.meta:
                found.add(origin.meta[RUN])
    return frozenset(found)
