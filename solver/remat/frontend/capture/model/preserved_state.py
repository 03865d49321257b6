"""Tensors and RNG states of a model that a capture replaces, and restores at its end.

A model on the "meta" device has shapes and no memory, so that a model can be planned where it does
not fit. A model in memory can be captured for another device of this machine, or for an absent GPU.
Then fake tensors are in the places of its tensors (`tensors_replaced_by_fakes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from remat.frontend.common.quantized import (
    ATTRIBUTES,
    is_quantized_subclass,
    memory_of,
    quantization_states,
)

_CAPTURE_TYPES = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of values that are meaningless after the capture."""


@contextmanager
def rng_state_preserved() -> Iterator[None]:
    """Restore the states of torch's default random generators, of the CPU and of all GPUs if CUDA
    is in use, at the end of the context."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def model_state_preserved(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers and random generators at the end of the context. A capture
    computes on fake tensors, but the model's code may assign to buffers or draw a seed, and torch
    does not restore the parameters of a module that has two names."""
    with _tensor_tables_preserved(model), rng_state_preserved():
        yield


@contextmanager
def _tensor_tables_preserved(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Yield the tables that have the parameters and buffers of modules, and other tensors of
    quantized weights. Restore them at the end."""
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    tables += [state.attributes for state in quantization_states(model)]
    before = [dict(table) for table in tables]
    try:
        yield tables
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


def is_capture_value(leaf: object) -> bool:
    """True for a fake tensor, a wrapper of one, and a symbol: they are meaningless after the
    capture."""
    is_wrapper = isinstance(leaf, torch.Tensor) and torch._is_functional_tensor(leaf)
    return is_wrapper or isinstance(leaf, _CAPTURE_TYPES)


def registered_buffers(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor | None]:
    """Return all registered buffers, by the module that owns them and their name there."""
    return {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }


def default_capture_device() -> torch.device:
    """Return the device that a "meta" model is captured for: CUDA if available, else the CPU.
    Kernels, and with them the saved tensors, depend on it."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def tensors_replaced_by_fakes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Within the context, replace the model's tensors on other devices by fake tensors on `device`.

    Yields `args` and `kwargs` with their tensors replaced too. Without a device, only tensors on
    "meta" are replaced, by fake tensors on `default_capture_device()`.
    """
    to_fake = _FakeTensorConverter(device)
    with _tensor_tables_preserved(model) as tables:
        for table in tables:
            table.update({name: to_fake(tensor) for name, tensor in table.items()})
        yield tree_map(to_fake, args), tree_map(to_fake, dict(kwargs))


class _FakeTensorConverter:
    """A function from tensors to fake tensors on one device. It maps the same tensor to the same
    fake tensor, so that tied weights stay tied, and the data of a parameter to its fake tensor."""

    def __init__(self, device: torch.device | None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device or default_capture_device()
        self._replaces_all_devices = device is not None
        self._fakes: dict[int, torch.Tensor] = {}
        self._parameters: dict[object, torch.Tensor] = {}
        """The fake tensors of parameters, by their memory."""

    def __call__(self, item: Any) -> Any:
        """Return the fake tensor of a tensor on "meta", or on another device than the one asked
        for; anything else unchanged."""
        if not isinstance(item, torch.Tensor):
            return item
        if is_quantized_subclass(item):
            names, options = item.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: self(getattr(item, name)) for name in names}
            subclass: Any = type(item)
            return subclass.__tensor_unflatten__(parts, options, item.shape, item.stride())
        is_elsewhere = self._replaces_all_devices and item.device != self._device
        if not (item.is_meta or is_elsewhere):
            return item
        is_parameter = isinstance(item, nn.Parameter)
        if not is_parameter and memory_of(item) in self._parameters:
            return self._parameters[memory_of(item)]
        if id(item) not in self._fakes:
            with self._mode:
                fake = torch.empty_strided(
                    item.shape, item.stride(), dtype=item.dtype, device=self._device
                )
            if is_parameter:
                fake = nn.Parameter(fake, requires_grad=item.requires_grad)
                setattr(fake, ATTRIBUTES, vars(item))
                self._parameters[memory_of(item)] = fake
            self._fakes[id(item)] = fake.requires_grad_(item.requires_grad)
        return self._fakes[id(item)]
