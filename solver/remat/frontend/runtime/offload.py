"""The operations that copy tensors to the host and back while other operations run.

The host is pinned memory for a GPU (`pinned_memory`), and a file where steps run on a CPU
(`host_file`). A handle is an int64 tensor with the number of a tensor on the host, so that it can
be saved for the backward like any other tensor. That tensor lives as long as a handle of it:
through a second backward (`retain_graph=True`), and not beyond a step that fails or has no
backward.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Protocol

import torch

from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
    RELOAD_TARGET,
)
from remat.errors import RematError
from remat.frontend.common.operators import register_operator
from remat.frontend.runtime.host_file import host_file
from remat.frontend.runtime.pinned_memory import pinned_memory, pinned_memory_of


class _HostCopy(Protocol):
    """A copy from the host that can be awaited."""

    def wait(self) -> None: ...


class _OffloadHost(Protocol):
    """Tensors on the host, by number: see `HostFile` and `PinnedMemory`."""

    def write(self, tensor: torch.Tensor) -> int: ...

    def wait(self, number: int) -> None: ...

    def read(self, number: int) -> tuple[torch.Tensor, _HostCopy]: ...

    def add_reference(self, number: int) -> None: ...

    def drop_reference(self, number: int) -> None: ...


_reading: dict[int, _HostCopy] = {}
"""Copies from the host that `arrive` has not awaited, by the address of the tensor."""


def offload(tensor: torch.Tensor) -> torch.Tensor:
    """Start the copy of a tensor to the host, and return a handle of it. Raises `RematError` for a
    device without copies."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise RematError(f'tensors on {tensor.device} cannot be offloaded: pass offload="off"')
    host: _OffloadHost = pinned_memory(tensor.device) if tensor.is_cuda else host_file()
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return _new_handle(host, host.write(tensor if is_dense else tensor.contiguous()))


def release(handle: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wait until the copy of `tensor` to the host has ended, and return a further handle of the
    copy."""
    number = int(handle)
    host = _host_of(number)
    host.wait(number)
    host.add_reference(number)
    return _new_handle(host, number)


def reload(handle: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor, start the copy from the host into it, and return it."""
    number = int(handle)
    tensor, copy = _host_of(number).read(number)
    _reading[tensor.data_ptr()] = copy
    # A step that fails may free the tensor before the copy into it has ended.
    weakref.finalize(tensor, _wait_for_freed_reload, tensor.data_ptr(), copy)
    return tensor


def arrive(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor's copy from the host has ended, and return the tensor."""
    _reading.pop(tensor.data_ptr()).wait()
    return tensor


def _wait_for_freed_reload(address: int, copy: _HostCopy) -> None:
    """Wait for the copy into a reloaded tensor that is freed, unless it has arrived. `address` is
    the tensor's."""
    if _reading.get(address) is copy:
        del _reading[address]
        with suppress(RematError):  # the step has failed already
            copy.wait()


def _host_of(number: int) -> _OffloadHost:
    """Return the host that has the tensor with this number: pinned memory for negative numbers,
    else the file."""
    return pinned_memory_of(number) if number < 0 else host_file()


def _new_handle(host: _OffloadHost, number: int) -> torch.Tensor:
    """Return a handle of the tensor with this number, with one of its references: freeing the
    handle drops it."""
    handle = torch.full((1,), number, device="cpu")
    weakref.finalize(handle, host.drop_reference, number)
    return handle


register_operator(OFFLOAD_TARGET, offload)
register_operator(RELEASE_TARGET, release)
register_operator(RELOAD_TARGET, reload)
register_operator(ARRIVE_TARGET, arrive)
