"""Costs of per-element work in Inductor's CPU kernels that does not depend on the bytes moved.

Inductor's CPU code generates random numbers one at a time, and packs and unpacks boolean masks one
element at a time. So a kernel that reads a mask takes many times as long as one that reads floats,
and to recompute a random mask costs less than to write and read it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from remat.frontend.compile.joint.fx_utils import is_seeded_random, num_elements, output_tensors
from remat.frontend.compile.kernels.fusion_groups import FusionGroup, tensors_read

_RANDOM_S, _MASK_WRITE_S, _MASK_READ_S = 7.5e-9, 8e-9, 2.8e-9
"""Seconds of one core for one random number, one mask element written, and one read (measured with
torch 2.13 on x86-64 with AVX-512, 2026; `docs/decisions/0010`)."""


def scalar_work_s(group: FusionGroup) -> float:
    """Return the seconds of one core for random numbers and boolean masks of a fusion group."""
    return scalar_operations_s(group.all_nodes, group.written, tensors_read(group))


def scalar_operations_s(
    operations: Iterable[fx.Node], written: Iterable[fx.Node], read: Iterable[fx.Node]
) -> float:
    """Return the seconds of one core for random numbers among the outputs of `operations`, and for
    boolean masks among the tensors `written` and `read`."""
    return (
        _RANDOM_S * sum(_cpu_elements(n) for n in operations if is_seeded_random(n))
        + _MASK_WRITE_S * sum(_cpu_elements(n, torch.bool) for n in written)
        + _MASK_READ_S * sum(_cpu_elements(n, torch.bool) for n in read)
    )


def _cpu_elements(node: fx.Node, dtype: torch.dtype | None = None) -> int:
    """Return the number of elements of a node's CPU tensors, of one dtype or of all."""
    tensors = (t for t in output_tensors(node) if t.device.type == "cpu")
    return sum(num_elements(t) for t in tensors if dtype in (None, t.dtype))
