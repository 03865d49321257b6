"""`TargetGpu`: a GPU that this machine does not have, and that a step is captured for.

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

DEFAULT_GPU = "h200"
"""The GPU that the device "cuda" stands for on a machine without one."""

CUDA_DEVICE = "cuda:0"
"""The device of all tensors of a step for a target GPU; `remat.lower` replaces it."""


@dataclass(frozen=True, slots=True)
class TargetGpu:
    """A CUDA device that is not on this machine: the name of its data sheet in
    `remat.costs.devices`, and its compute capability."""

    name: str
    capability: tuple[int, int]


def find_target_gpu(device: str | torch.device | None) -> TargetGpu | None:
    """Return the absent GPU that `device` names ("h100"); `DEFAULT_GPU` for "cuda" where torch sees
    none. None without a name, for "cpu", and for "cuda" where torch sees a GPU.

    Raises `TraceError` for a name that is no torch device and has no data sheet, or whose data
    sheet is not of a CUDA device.
    """
    if device is None:
        return None
    name = str(device).strip().lower()
    if name.partition(":")[0] == "cpu" or (_is_cuda_name(name) and torch.cuda.is_available()):
        return None
    if _is_cuda_name(name):
        return _target_gpu_by_name(DEFAULT_GPU)
    return _target_gpu_by_name(name)


def is_default_gpu(device: str | torch.device | None) -> bool:
    """True if `device` is "cuda" on a machine without a GPU, so that it stands for
    `DEFAULT_GPU`."""
    is_cuda = device is not None and _is_cuda_name(str(device).strip().lower())
    return is_cuda and find_target_gpu(device) is not None


def local_device(name: str | torch.device) -> torch.device:
    """Return the device of this machine with this name. Raises `TraceError` if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TraceError(f"the device {str(name)!r} is not known; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise TraceError(f"remat does not support the device {str(name)!r}; use cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")  # of "cpu:0": tensors have the device without an index
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise TraceError(
                f"the device is {str(name)!r}, and torch {torch.__version__} sees {count} CUDA "
                "devices; use cpu, or see `remat doctor` for what is missing"
            )
    return device


def local_gpu_name(device: str) -> str:
    """Return the data sheet name ("h100") of this machine's GPU at `device` ("cuda:0"), or "" if
    there is no GPU or no data sheet for it."""
    if not _is_cuda_name(device) or not torch.cuda.is_available():
        return ""
    spec = match_device(torch.cuda.get_device_name(device))
    return "" if spec is None else spec.name


def _is_cuda_name(name: str) -> bool:
    """True for "cuda", with or without an index."""
    type_, _, index = name.partition(":")
    return type_ == "cuda" and (not index or index.isdigit())


def _target_gpu_by_name(name: str) -> TargetGpu:
    """Return the GPU with this data sheet. Raises `TraceError` if there is none, or if it is no
    CUDA device."""
    supported = ", ".join(key for key, spec in DEVICES.items() if spec.capability)
    try:
        spec = find_device(name)
    except ValueError:
        raise TraceError(
            f"cannot trace for the device {name!r}: use cpu, cuda, or a GPU by name: {supported}"
        ) from None
    if spec.capability is None:
        raise TraceError(
            f"cannot trace for {spec.name} on a machine without it: which kernels torch runs there "
            f"is known for {supported}"
        )
    return TargetGpu(spec.name, spec.capability)
