"""Models on another device than they are captured for: on "meta", which has shapes and no memory,
so that a model can be planned where it does not fit, or on a device that is here while the step is
for one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map


def nominal_device() -> torch.device:
    """The device that a model without one is captured for: CUDA where there is one, else the CPU
    (kernels, and with them what a step saves, depend on it)."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def placed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments, and inside the block the model's own tensors, with fake tensors of `device` in
    place of those elsewhere. Without a device, only those on "meta" are replaced, by tensors of
    `nominal_device()`."""
    faked = _Faked(device)
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and faked.replaces(tensor):
                    before.append((tensors, name, tensor))
    try:
        for tensors, name, tensor in before:
            tensors[name] = faked(tensor)
        yield tree_map(faked, args), tree_map(faked, dict(kwargs))
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor


class _Faked:
    """A fake tensor for each that is elsewhere; the same for the same, so that tied weights stay
    tied."""

    def __init__(self, device: torch.device | None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device or nominal_device()
        self._is_for_all = device is not None
        self._made: dict[int, torch.Tensor] = {}

    def replaces(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is elsewhere."""
        return tensor.is_meta or (self._is_for_all and tensor.device != self._device)

    def __call__(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not self.replaces(item):
            return item
        if id(item) not in self._made:
            with self._mode:
                fake = torch.empty_strided(
                    item.shape, item.stride(), dtype=item.dtype, device=self._device
                )
            if isinstance(item, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=item.requires_grad)
            self._made[id(item)] = fake.requires_grad_(item.requires_grad)
        return self._made[id(item)]
