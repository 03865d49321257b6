"""CPU tensors over the memory of CUDA tensors.

Device memory of the software GPU is mapped into the process, at the addresses that torch sees.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_ADDRESS_SPACE = ctypes.c_char * (1 << 46)
"""One array type for all addresses: ctypes keeps each array type that is ever used."""


def host_tensor(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares memory, sizes and strides with a CUDA tensor.

    A tensor of another device is returned as it is. The memory must live as long as the result.
    """
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    size_bytes = storage.nbytes()
    host = torch.empty(0, dtype=tensor.dtype)
    if size_bytes:
        memory = _ADDRESS_SPACE.from_address(storage.data_ptr())
        shared = torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes).untyped_storage()
    else:
        shared = host.untyped_storage()
    host.set_(shared, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    if tensor.is_conj():
        host = torch.conj(host)
    return torch._neg_view(host) if tensor.is_neg() else host


def write(target: Tensor, values: Tensor) -> None:
    """Copy `values` into the memory of `target`, which has the same sizes."""
    host = host_tensor(target)
    if host.numel() == 0:
        return
    for dimension, (size, stride) in enumerate(zip(host.size(), host.stride(), strict=True)):
        if stride == 0 and size > 1:  # one element in memory, which may be written only once
            host, values = host.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    host.copy_(values)
