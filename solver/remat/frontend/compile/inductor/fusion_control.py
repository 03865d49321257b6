"""Control of Inductor's fusion: it generates exactly the kernels that were planned.

Inductor fuses in two steps, and both could undo a plan. During lowering, it inlines cheap producers
into their consumers instead of writing them to memory, so that the producers' inputs live longer.
Then its scheduler fuses kernels that read the same tensors, so that they run at the same time.
Therefore `materialize` marks each tensor that was planned to be written to memory, and the
scheduler may only fuse operations of the same run of the schedule. Patches of torch, each undone
when its context ends, keep the kernels' calls and buffers as planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from remat.frontend.compile.compat import SchedulerPass

RUN_KEY = "remat_run"
"""Key of `node.meta`: (number of the plan, index of the run in its schedule)."""

PLAIN_KEY = "remat_plain"
"""Key of `node.meta` in a graph that keeps Inductor's own kernels: the number of its plan."""

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("materialize(Tensor x, bool separate=False) -> Tensor")


def _materialize_eagerly(x: torch.Tensor, separate: bool = False) -> torch.Tensor:
    """Return a copy: an operator must not return its argument."""
    return x.clone()


def _materialize_fake(x: torch.Tensor, separate: bool = False) -> torch.Tensor:
    """Return a fake tensor in the layout of `x`."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


_library.impl("materialize", _materialize_eagerly, "CompositeExplicitAutograd")
torch.library.register_fake("remat::materialize", _materialize_fake, lib=_library)

materialize = torch.ops.remat.materialize.default
"""Operator that returns its argument and makes Inductor write it to memory. With `separate`, it is
a buffer of its own: otherwise Inductor may write an operand of a concatenation directly into the
result, and a slice that has other readers keeps the whole result alive."""


@register_lowering(materialize, type_promotion_kind=None)
def _lower_materialize(x: Any, separate: bool = False) -> Any:
    """Lower `materialize` to Inductor's IR: write `x` to memory, and return it."""
    x.realize()
    if separate:
        buffer: Any = V.graph.try_get_buffer(x.get_name())
        if buffer is not None:  # graph inputs have a fixed layout already
            buffer.decide_layout()
    return x


class PlannedFusionChoices(InductorChoices):
    """Inductor's own choices, except that a kernel contains nodes of a single run of the schedule.
    Graphs without a plan are compiled as usual."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """True if two scheduler nodes may become one kernel: if they contain nodes of the same run,
        or have no plan, and Inductor would fuse them."""
        runs1, runs2 = schedule_runs_in(node1), schedule_runs_in(node2)
        if (runs1 or runs2) and runs1.isdisjoint(runs2):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        """Return the key of these choices in Inductor's cache."""
        return "remat: a kernel contains nodes of one run of the schedule"


class InstallFusionChoices(SchedulerPass):
    """Scheduler pass, before fusion, that applies `PlannedFusionChoices` to graphs with a plan.

    A thread keeps the choices with which it compiled its first graph, whatever later options are.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if not isinstance(V.choices, PlannedFusionChoices) and any(map(schedule_runs_in, nodes)):
            V.set_choices_handler(PlannedFusionChoices())
        return nodes

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's cache."""
        return PlannedFusionChoices().uuid()


def plan_number_of(kernels: Iterable[Any]) -> int | None:
    """Return the number of the plan that these scheduler nodes belong to; None without a plan."""
    for kernel in kernels:
        for part in kernel.get_nodes():
            for origin in getattr(part.node, "origins", None) or ():
                if RUN_KEY in origin.meta:
                    return origin.meta[RUN_KEY][0]
                if PLAIN_KEY in origin.meta:
                    return origin.meta[PLAIN_KEY]
    return None


def schedule_runs_in(kernel: Any) -> frozenset[tuple[int, int]]:
    """Return the runs of schedules whose nodes a scheduler node contains, each as (number of the
    plan, index of the run); none without a plan."""
    runs: set[tuple[int, int]] = set()
    for part in kernel.get_nodes():
        for origin in getattr(part.node, "origins", None) or ():
            if RUN_KEY in origin.meta:
                runs.add(origin.meta[RUN_KEY])
    return frozenset(runs)


@contextmanager
def non_lazy_backward() -> Iterator[None]:
    """Inside of this context, let torch compile the backward together with the forward instead of
    at the first `backward()` call.

    Its peak is then verified before a training step runs.
    """
    from torch._functorch import config

    with config.patch(force_non_lazy_backward_lowering=True):
        yield


@contextmanager
def separate_cpu_kernel_calls() -> Iterator[None]:
    """Inside of this context, let Inductor generate one call for each C++ kernel, as on a GPU.

    On the CPU, Inductor merges all kernels between two extern kernels into one call. Then what the
    first kernel reads is freed only after the last one, and what the last one writes is allocated
    before the first one.
    """
    from torch._inductor.codegen import cpp

    scheduling: Any = cpp.CppScheduling
    max_arguments = scheduling.MAX_FUSED_KERNEL_ARGS_NUM
    scheduling.MAX_FUSED_KERNEL_ARGS_NUM = -1
    try:
        yield
    finally:
        scheduling.MAX_FUSED_KERNEL_ARGS_NUM = max_arguments


@contextmanager
def immediate_buffer_reuse() -> Iterator[None]:
    """Inside of this context, let only the next kernel reuse a dead buffer; without such a kernel,
    Inductor frees the buffer, as planned.

    Inductor keeps a dead buffer for a later one of the same size, as long as its own estimate of
    the peak allows.
    """
    from torch._inductor.codegen.wrapper import AllocateLine

    def is_next_kernel(line: Any, free_line: Any, size: int) -> bool:
        return free_line.scheduler_node_index + 1 == line.scheduler_node_index

    allocate_line: Any = AllocateLine
    original = allocate_line.should_reuse_buffer
    allocate_line.should_reuse_buffer = is_next_kernel
    try:
        yield
    finally:
        allocate_line.should_reuse_buffer = original
