"""Operators that copy tensors to the host and back in compiled graphs.

They are opaque to Inductor: it calls them as extern kernels, in the order of the graph, with
arguments in the strides that are planned. None of them changes an argument or returns one, so that
Inductor frees memory after its last use, as any other. While a tensor comes back, a handle stands
for it: the memory is allocated by `reload`, and Inductor knows the tensor from `arrive` on. The
peak check adds it between the two (`peak_check`).

What a plan with copies promises depends on their order among all kernels. So it is verified before
code generation: no kernel of an earlier run comes after a copy, and none of a later one before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch._inductor.ir import MultiOutput
from torch._ops import OpOverload

from remat.frontend.compile.fx_utils import node_bytes
from remat.frontend.compile.inductor.fusion_control import schedule_runs_in
from remat.frontend.runtime import offload as runtime

INPUTS_KEY = "eager_input_vals"
"""Key of `node.meta`: fake arguments and keyword arguments, in whose strides Inductor passes the
real ones to an operator that needs exact strides. Without it, they have any strides."""

_STRIDES = (torch.Tag.needs_exact_strides,)

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("offload(Tensor x) -> Tensor", tags=_STRIDES)
_library.define("release(Tensor handle, Tensor x) -> Tensor", tags=_STRIDES)
_library.define("reload(Tensor handle) -> Tensor", tags=_STRIDES)
_library.define(
    "arrive(Tensor handle, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) "
    "-> Tensor",
    tags=_STRIDES,
)

_numbers = count()
_arriving: dict[int, torch.Tensor] = {}
"""Tensors on their way back, by the number in their handle."""


def _reload_with_handle(handle: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor, start the copy from the host into it, and return a handle of it. The
    tensor is freed with the handle unless it has arrived."""
    number = next(_numbers)
    _arriving[number] = runtime.reload(handle)
    reloading = torch.full((1,), number, device="cpu")
    weakref.finalize(reloading, _arriving.pop, number, None)
    return reloading


def _arrive_from_handle(
    handle: torch.Tensor,
    size: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Wait for the copy of a `reload`, and return its tensor. The layout is only for the
    compiler."""
    return runtime.arrive(_arriving.pop(int(handle)))


def fake_handle(*_: Any) -> torch.Tensor:
    """Return a tensor like the handles of copies: one number, on the CPU."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_arrive(
    handle: torch.Tensor,
    size: list[Any],
    stride: list[Any],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a fake tensor in this layout."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _function, _fake in (
    ("offload", runtime.offload, fake_handle),
    ("release", runtime.release, fake_handle),
    ("reload", _reload_with_handle, fake_handle),
    ("arrive", _arrive_from_handle, _fake_arrive),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{_name}", _fake, lib=_library)

COPY_OPERATORS: dict[str, OpOverload] = {
    name: getattr(torch.ops.remat, name).default
    for name in ("offload", "release", "reload", "arrive")
}
"""The operators by name. `offload` starts the copy of a tensor to the host, and returns a handle of
it. `release` waits until that copy has ended, and returns a handle of the copy. `reload` allocates
a tensor, starts the copy from the host into it, and returns a handle of it. `arrive` waits until
that copy has ended, and returns the tensor, which has this size, strides, dtype and device."""


_NAMES = {operator: name for name, operator in COPY_OPERATORS.items()}


class CopiesOutOfOrder(Exception):
    """Raised when Inductor's scheduled kernels do not have the planned order."""


class ReloadingTensor(NamedTuple):
    """A tensor on its way back: allocated before the kernel `start`, and known to Inductor from the
    kernel `end` on."""

    start: int
    end: int
    size_bytes: int


def check_copy_order(kernels: Sequence[Any]) -> None:
    """Raise `CopiesOutOfOrder` unless all kernels before a copy operator are of earlier runs of the
    schedule, and all after it of later ones. Kernels without a run do not count."""
    latest_run, latest_copy = -1, -1
    for kernel in kernels:
        runs = [run for _, run in schedule_runs_in(kernel)]
        if not runs:
            continue
        run = max(runs)  # the kernel may compute cheap tensors of earlier runs
        name = _copy_operator_name(kernel)
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
    """Return the tensors that have memory before Inductor knows them, each from its `reload` to its
    `arrive`."""
    started: dict[str, int] = {}  # by the names of handles
    reloading: list[ReloadingTensor] = []
    for step, kernel in enumerate(kernels):
        reads = [read.name for read in kernel.read_writes.reads]
        name = _copy_operator_name(kernel)
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


def _copy_operator_name(kernel: Any) -> str:
    """Return the name of the copy operator that a kernel calls; "" for all other kernels."""
    return _NAMES.get(kernel.node.op_overload, "") if kernel.is_extern() else ""
