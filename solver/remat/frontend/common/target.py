"""`Target`: a GPU that a step is captured for, and that is not here.

Such a step is captured on fake tensors of the CPU, with the operations that torch would run on that
GPU (`frontend.capture.eager_kernels.overrides`), and its devices are renamed afterwards. Fake CUDA
tensors are not an option: a build of torch without CUDA cannot create them, and their backward
needs a CUDA context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remat.costs.devices import DEVICES, find_device, match_device
from remat.errors import TraceError

ANY = "h200"
"""What "cuda" means where there is no GPU."""

PLACE = "cuda:0"
"""Where its tensors are; `remat.lower` puts the program where the model is."""


@dataclass(frozen=True, slots=True)
class Target:
    """A CUDA device by the name of its data sheet (`remat.costs.devices`), with its compute
    capability."""

    name: str
    capability: tuple[int, int]


def find_target(device: str | torch.device | None) -> Target | None:
    """The GPU that `device` names ("h100"), or one for "cuda" where torch sees none; None for a
    device that is here.

    Raises `TraceError` for what is no device of torch and has no data sheet, or is no CUDA device.
    """
    if device is None:
        return None
    name = str(device).strip().lower()
    if name == "cpu" or (_is_cuda(name) and torch.cuda.is_available()):
        return None
    if _is_cuda(name):
        return _target(ANY)
    return _target(name)


def device_here(name: str | torch.device) -> torch.device:
    """The device of this machine with this name. Raises `TraceError` where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TraceError(f"the device {str(name)!r} is not known; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise TraceError(f"remat does not support the device {str(name)!r}; use cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise TraceError(
                f"the device is {str(name)!r}, and torch {torch.__version__} sees {count} CUDA "
                "devices; use cpu, or see `remat doctor` for what is missing"
            )
    return device


def gpu_at(device: str) -> str:
    """The GPU that is here at `device` ("cuda:0"), by the name of its data sheet; "" where there is
    none, or it has none."""
    if not _is_cuda(device) or not torch.cuda.is_available():
        return ""
    known = match_device(torch.cuda.get_device_name(device))
    return "" if known is None else known.name


def _is_cuda(name: str) -> bool:
    kind, _, index = name.partition(":")
    return kind == "cuda" and (not index or index.isdigit())


def _target(name: str) -> Target:
    able = ", ".join(known for known, device in DEVICES.items() if device.capability)
    try:
        device = find_device(name)
    except ValueError:
        raise TraceError(
            f"cannot trace for the device {name!r}: use cpu, cuda, or a GPU by name: {able}"
        ) from None
    if device.capability is None:
        raise TraceError(
            f"cannot trace for {device.name} where it is not: which kernels torch runs there is "
            f"known for {able}"
        )
    return Target(device.name, device.capability)
