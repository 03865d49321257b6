"""The operations that move tensors to the host and back while other operations run.

On a CPU the host is a file (`host_file`). A handle is a tensor of one number, so that it can be
saved for the backward as other tensors are; the slot in the file lives as long as the handle that
`release` returned. A second backward (`retain_graph=True`) can thus read the slot once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
    RELOAD_TARGET,
)
from remat.errors import RematError
from remat.frontend.common.operators import register
from remat.frontend.runtime.host_file import HostFile, host_file

_written: dict[int, Future[None]] = {}
"""Copies to the host that `release` has not awaited, by slot."""

_read: dict[int, Future[None]] = {}
"""Copies from the host that `arrive` has not awaited, by the address of the tensor."""


def offload(tensor: torch.Tensor) -> torch.Tensor:
    """Start the copy of a tensor to the host, and return its handle."""
    if tensor.device.type != "cpu":
        raise RematError(f"tensors on {tensor.device} cannot be offloaded yet, only those of a CPU")
    file = host_file()
    slot, future = file.write(tensor)
    _written[slot] = future
    handle = torch.tensor([slot])
    weakref.finalize(handle, _free_unreleased, file, slot)
    return handle


def _free_unreleased(file: HostFile, slot: int) -> None:
    """Free the slot of a handle that never reached `release`, after an error in the forward."""
    if (future := _written.pop(slot, None)) is not None:
        future.add_done_callback(lambda _: file.free(slot))


def release(handle: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor's copy to the host has ended, and return a handle of the copy."""
    slot = int(handle)
    _written.pop(slot).result()
    stored = handle.clone()
    weakref.finalize(stored, host_file().free, slot)
    return stored


def reload(
    handle: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a tensor, start the copy from the host into it, and return it."""
    tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    _read[tensor.data_ptr()] = host_file().read(int(handle), tensor)
    return tensor


def arrive(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor's copy from the host has ended, and return the tensor."""
    _read.pop(tensor.data_ptr()).result()
    return tensor


register(OFFLOAD_TARGET, offload)
register(RELEASE_TARGET, release)
register(RELOAD_TARGET, reload)
register(ARRIVE_TARGET, arrive)
