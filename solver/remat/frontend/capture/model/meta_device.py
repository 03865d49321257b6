"""Fake tensors in place of a model's tensors that are on another device than the capture.

A model on the "meta" device has shapes and no memory, so that a model can be planned where it does
not fit. A model in memory can be captured for another device of this machine, or for an absent GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map


def default_capture_device() -> torch.device:
    """Return the device that a "meta" model is captured for: CUDA if available, else the CPU.
    Kernels, and with them the saved tensors, depend on it."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def tensors_placed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Within the context, replace the model's tensors on other devices by fake tensors on `device`.

    Yields the arguments with their tensors replaced too. Without a device, only tensors on "meta"
    are replaced, by fake tensors on `default_capture_device()`.
    """
    to_fake = _FakeTensorConverter(device)
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and to_fake.is_replaced(tensor):
                    originals.append((table, name, tensor))
    try:
        for table, name, tensor in originals:
            table[name] = to_fake(tensor)
        yield tree_map(to_fake, args), tree_map(to_fake, dict(kwargs))
    finally:
        for table, name, tensor in originals:
            table[name] = tensor


class _FakeTensorConverter:
    """A function from tensors to fake tensors on one device. It maps the same tensor to the same
    fake tensor, so that tied weights stay tied."""

    def __init__(self, device: torch.device | None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device or default_capture_device()
        self._replaces_all_devices = device is not None
        self._fakes: dict[int, torch.Tensor] = {}

    def is_replaced(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is on "meta", or on another device than the one asked for."""
        is_elsewhere = self._replaces_all_devices and tensor.device != self._device
        return tensor.is_meta or is_elsewhere

    def __call__(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not self.is_replaced(item):
            return item
        if id(item) not in self._fakes:
            with self._mode:
                fake = torch.empty_strided(
                    item.shape, item.stride(), dtype=item.dtype, device=self._device
                )
            if isinstance(item, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=item.requires_grad)
            self._fakes[id(item)] = fake.requires_grad_(item.requires_grad)
        return self._fakes[id(item)]
