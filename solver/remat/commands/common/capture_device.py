"""The type of the device on which a step is captured, for autocast."""

from __future__ import annotations


def capture_device_type(device: str | None) -> str:
    """Return the type of the device on which a step for `device` is captured: "cpu" or "cuda".
    Raises `TraceError` for a device that does not exist."""
    from remat.frontend.capture.model.preserved_state import default_capture_device
    from remat.frontend.common.target_gpu import find_target_gpu, local_device

    if find_target_gpu(device) is not None:
        return "cpu"  # a capture for an absent GPU has its tensors on the CPU
    return default_capture_device().type if device is None else local_device(device).type
