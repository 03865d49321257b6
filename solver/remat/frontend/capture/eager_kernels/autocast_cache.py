"""Autocast's weight cache, for captures; see `remat.frontend.capture.eager_kernels.overrides`.

Under autocast, eager mode casts each parameter once, however often it is used, and sums the
gradients of those uses in the lower precision. Torch's cache is off during a capture, since it
would take any input for a parameter. Without this one, each use would be cast, as many copies
stored, and the gradients summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_to_copy = torch.ops.aten._to_copy.default


class AutocastCache:
    """The casts that autocast makes in one captured forward, by tensor and dtype."""

    def __init__(self) -> None:
        # Read here, because the capture turns torch's cache off.
        self._is_enabled = torch.is_autocast_cache_enabled()
        self._leaves: dict[int, tuple[torch.Tensor, int]] = {}
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def start_forward(self, leaf_groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Clear the cache for a new forward, and set the tensors whose casts it stores: parameters
        and those inputs that are leaves of autograd. Tensors of one group share their casts (tied
        weights)."""
        self._leaves = {
            id(tensor): (tensor, index)
            for index, group in enumerate(leaf_groups)
            for tensor in group
        }
        self._casts.clear()

    def to_copy(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Replace `aten._to_copy`: if autocast casts a parameter or input, use the cached cast."""
        _, leaf = self._leaves.get(id(x), (x, -1))
        dtype = kwargs.get("dtype")
        if dtype is None or leaf < 0 or not (self._is_enabled and _is_autocast_cast(x, dtype)):
            return _uncached_to_copy(x, **kwargs)
        if (leaf, dtype) not in self._casts:
            self._casts[leaf, dtype] = _uncached_to_copy(x, **kwargs)
        return self._casts[leaf, dtype]

    @contextmanager
    def cleared_with_torch_cache(self) -> Iterator[None]:
        """Within the context, also clear this cache when torch clears its own, which it does at the
        end of the outermost autocast region."""
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._casts.clear()
            clear()

        torch.clear_autocast_cache = clear_both
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear


def _is_autocast_cast(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if autocast makes this cast, and not the model. Autocast's kernels cast while autocast
    is off, inside of a region where it is on; the model's casts there run while it is on."""
    device = x.device.type
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        x.requires_grad
        and x.dtype == torch.float32
        and dtype == torch.get_autocast_dtype(device)
        and depth > 0
        and not torch.is_autocast_enabled(device)
    )


def _uncached_to_copy(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run torch's `aten._to_copy`, without the cache."""
    with torch._C._DisablePythonDispatcher():
        return _to_copy(x, **kwargs)
