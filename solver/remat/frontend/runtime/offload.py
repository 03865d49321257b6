"""The operations that copy tensors to the host and back while other operations run.

Where steps run on a CPU, a file stands in for the host's memory (`host_file`). A handle is an int64
tensor with the number of a slot, so that it can be saved for the backward like any other tensor.
The slot lives as long as a handle of it: through a second backward (`retain_graph=True`), and not
beyond a step that fails or has no backward.
"""

from __future__ import annotations

import weakref
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

_reading: dict[int, Future[None]] = {}
"""Copies from the host that `arrive` has not awaited, by the address of the tensor."""


def offload(tensor: torch.Tensor) -> torch.Tensor:
    """Start the copy of a tensor to the host, and return a handle of it."""
    if tensor.device.type != "cpu":
        raise RematError(f"tensors on {tensor.device} cannot be offloaded yet, only those of a CPU")
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()
    file = host_file()
    return _handle(file, file.write(tensor))


def release(handle: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor's copy to the host has ended, and return a handle of the copy."""
    file, number = host_file(), int(handle)
    file.wait(number)
    file.add_reference(number)
    return _handle(file, number)


def _handle(file: HostFile, number: int) -> torch.Tensor:
    """Return a handle that has one of the slot's references."""
    handle = torch.full((1,), number)
    weakref.finalize(handle, file.drop_reference, number)
    return handle


def reload(handle: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor, start the copy from the host into it, and return it."""
    tensor, future = host_file().read(int(handle))
    _reading[tensor.data_ptr()] = future
    return tensor


def arrive(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor's copy from the host has ended, and return the tensor."""
    _reading.pop(tensor.data_ptr()).result()
    return tensor


register(OFFLOAD_TARGET, offload)
register(RELEASE_TARGET, release)
register(RELOAD_TARGET, reload)
register(ARRIVE_TARGET, arrive)
