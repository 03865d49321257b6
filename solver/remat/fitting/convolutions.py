"""Convolutions, whose workspaces cuDNN selects: what an answer says about them."""

from __future__ import annotations

from remat.allocator.prediction import is_on_cuda
from remat.documents.trace import Trace, convolutions


def convolution_notes(trace: Trace, *, are_measured: bool) -> list[str]:
    """Return a sentence about the workspaces of a step's convolutions; none without convolutions,
    and for a CPU. `are_measured` is True if the peak contains them."""
    count = len(convolutions(trace))
    if not count or not is_on_cuda(trace):
        return []
    if are_measured:
        return [f"workspaces of {count:,} convolutions, forward and backward, measured on this GPU"]
    return [
        f"the workspaces that cuDNN takes for {count:,} convolutions, forward and backward, are "
        "unknown without the GPU, and not part of the peak"
    ]
