"""Copies between device and host among Inductor's scheduled kernels: their order and their memory.

What a plan with copies promises depends on their order among all kernels. So it is verified before
code generation: no kernel of an earlier run comes after a copy, and none of a later one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch._inductor.ir import MultiOutput

from remat.frontend.compile.inductor.copy_operators import COPY_OPERATORS
from remat.frontend.compile.inductor.fusion_control import schedule_runs_in
from remat.frontend.compile.joint.fx_utils import node_bytes

_NAMES = {operator: name for name, operator in COPY_OPERATORS.items()}


class CopiesOutOfOrder(Exception):
    """Raised when Inductor's scheduled kernels do not have the planned order."""


class ReloadingTensor(NamedTuple):
    """A tensor on its way back: allocated before the kernel `start`, and known to Inductor from the
    kernel `end` on."""

    start: int
    end: int
    size_bytes: int


def check_order(kernels: Sequence[Any]) -> None:
    """Raise `CopiesOutOfOrder` unless all kernels before a copy are of earlier runs of the
    schedule, and all after it of later ones."""
    latest_run, latest_copy = -1, -1
    for kernel in kernels:
        runs = [run for _, run in schedule_runs_in(kernel)]
        if not runs:
            continue
        run, name = max(runs), _copy_name(kernel)  # it may compute cheap tensors of earlier runs
        previous = latest_run if name else latest_copy
        if run < previous:
            raise CopiesOutOfOrder(
                f"Inductor calls {name or kernel.get_name()} of run {run} after run {previous}: "
                "the copies of offloaded tensors are not where they were planned; pass "
                'offload="off"'
            )
        latest_run = max(latest_run, run)
        if name:
            latest_copy = run


def reloading_tensors(kernels: Sequence[Any]) -> list[ReloadingTensor]:
    """Return the tensors that have memory before Inductor knows them: from `reload` to `arrive`."""
    started: dict[str, int] = {}  # by the names of handles
    reloading: list[ReloadingTensor] = []
    for step, kernel in enumerate(kernels):
        reads = [read.name for read in kernel.read_writes.reads]
        name = _copy_name(kernel)
        if name == "reload":
            started.update((buffer.get_name(), step) for buffer in kernel.get_outputs())
        elif name == "arrive":
            (call,) = (n for n in kernel.node.origins if n.target is COPY_OPERATORS["arrive"])
            size_bytes = node_bytes(call)
            reloading += [
                ReloadingTensor(started[r], step, size_bytes) for r in reads if r in started
            ]
        elif isinstance(kernel.node, MultiOutput):  # selects the result of an extern kernel
            starts = {
                buffer.get_name(): started[r]
                for buffer in kernel.get_outputs()
                for r in reads
                if r in started
            }
            started.update(starts)
    return reloading


def _copy_name(kernel: Any) -> str:
    """Return which of the four operators a kernel calls; "" for all other kernels."""
    return _NAMES.get(kernel.node.op_overload, "") if kernel.is_extern() else ""
