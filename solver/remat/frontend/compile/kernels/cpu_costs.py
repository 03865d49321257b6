"""What Inductor's kernels on CPUs do number by number, whatever moves in memory.

Random numbers are drawn one at a time, and truth values are packed and unpacked one at a time: a
kernel that reads a mask takes many times what one does that reads floats. So a mask that is drawn
again costs less than one that is written and read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from remat.frontend.compile.joint.fx_utils import elements, is_draw, tensors
from remat.frontend.compile.kernels.fusion_groups import Region, reads_of

_DRAWN_S, _WRITTEN_S, _READ_S = 7.5e-9, 8e-9, 2.8e-9
"""One core, one random number, one truth value (measured with torch 2.13 on x86-64 with AVX-512,
2026; `docs/decisions/0038`)."""


def scalars_s(region: Region) -> float:
    """Seconds of one core, for what a kernel does number by number."""
    return counted_s(region.all_nodes, region.written, reads_of(region))


def counted_s(
    calls: Iterable[fx.Node], written: Iterable[fx.Node], read: Iterable[fx.Node]
) -> float:
    """The same for operations, what of theirs is written and what they read."""
    return (
        _DRAWN_S * sum(_on_cpu(n) for n in calls if is_draw(n))
        + _WRITTEN_S * sum(_on_cpu(n, torch.bool) for n in written)
        + _READ_S * sum(_on_cpu(n, torch.bool) for n in read)
    )


def _on_cpu(node: fx.Node, dtype: torch.dtype | None = None) -> int:
    """How many numbers it has there, of this type."""
    found = (t for t in tensors(node) if t.device.type == "cpu" and dtype in (None, t.dtype))
    return sum(map(elements, found))
