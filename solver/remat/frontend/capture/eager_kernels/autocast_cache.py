"""Autocast's cache of casts, for captures; see `remat.frontend.capture.eager_kernels.overrides`.

Under autocast, eager mode casts each parameter once, however often it is used, and sums the
gradients of those uses in the lower type. A capture turns the cache off: it would cast at each use,
keep as many copies, and sum in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_to_copy = torch.ops.aten._to_copy.default


class Casts:
    """The casts of one captured forward."""

    def __init__(self) -> None:
        self._is_on = torch.is_autocast_cache_enabled()  # asked before the capture turns it off
        self._leaves: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def begin(self, leaves: Iterable[Sequence[torch.Tensor]]) -> None:
        """A forward begins. `leaves` are what eager mode caches casts of, parameters and inputs;
        tensors in one group are one tensor to eager mode (tied weights)."""
        self._leaves = {id(t): (t, number) for number, group in enumerate(leaves) for t in group}
        self._made.clear()

    def cast(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`aten._to_copy`, once for each leaf that autocast casts."""
        _, leaf = self._leaves.get(id(x), (x, -1))
        dtype = kwargs.get("dtype")
        if dtype is None or leaf < 0 or not (self._is_on and _is_by_autocast(x, dtype)):
            return _original(x, **kwargs)
        if (leaf, dtype) not in self._made:
            self._made[leaf, dtype] = _original(x, **kwargs)
        return self._made[leaf, dtype]

    @contextmanager
    def cleared_as_eager(self) -> Iterator[None]:
        """Within it, leaving the outermost autocast forgets these casts as well."""
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._made.clear()
            clear()

        torch.clear_autocast_cache = clear_both
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear


def _is_by_autocast(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Its kernels cast while it is off, within a region where it was on; the model's own casts in
    such a region are made while it is on."""
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


def _original(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch._C._DisablePythonDispatcher():
        return _to_copy(x, **kwargs)
