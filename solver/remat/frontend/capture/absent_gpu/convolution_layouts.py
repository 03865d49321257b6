"""Memory layouts of convolutions on an absent GPU: those that cuDNN selects.

A capture on the CPU would have those of the CPU's libraries, which depend on the batch size, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._prims_common import suggest_memory_format

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@contextmanager
def cudnn_convolution_layouts() -> Iterator[None]:
    """Within the context, fake convolutions have the layouts of cuDNN. For captures, which run one
    at a time."""
    original = torch._C._conv_determine_backend_memory_format
    torch._C._conv_determine_backend_memory_format = _cudnn_memory_format
    try:
        yield
    finally:
        torch._C._conv_determine_backend_memory_format = original


def _cudnn_memory_format(
    x: torch.Tensor, weight: torch.Tensor, backend: object
) -> torch.memory_format:
    """Return the memory format of a convolution's results: channels-last if input or weight is, but
    never in float64. Source: `cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h, torch
    2.11 to 2.15."""
    if torch.float64 in (x.dtype, weight.dtype):
        return torch.contiguous_format
    for tensor in (x, weight):
        memory_format = suggest_memory_format(tensor)
        if memory_format in _CHANNELS_LAST:
            return memory_format
    return torch.contiguous_format
