"""Results of kernels whose layout a fake tensor gets wrong.

Some operators have their fakes from decompositions, which lay out what they make otherwise than the
kernels do where arguments differ in layout. A capture then reads a gradient as a view where only a
copy can: "view size is not compatible with input tensor's size and stride", at the first step. (So
seen in torch 2.13 and 2.15 with `softplus_backward`; torch's own aot_eager fails the same way.) For
the length of a capture these operators have the kernels' layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses import FakeTensorMode

Layout = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""An empty tensor like the first one, laid out as the kernel does for these arguments."""


def _contiguous(made: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty_like(made, memory_format=torch.contiguous_format)


def _elementwise(made: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.shape == made.shape]
    strides = compute_elementwise_output_strides(*tensors)
    return made.new_empty_strided(made.shape, strides)


def _like_input(made: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty_like(args[1], dtype=made.dtype)


def _batch_norm(made: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Of the CPU: channels last, or contiguous."""
    of = next(a for a in args[1::-1] if isinstance(a, torch.Tensor) and a.shape == made.shape)
    if made.device.type != "cpu":
        return made
    return torch.empty_like(made, memory_format=suggest_memory_format(of))


_aten = torch.ops.aten

LAYOUTS: dict[Any, Layout] = {
    _aten.softplus_backward.default: _elementwise,
    _aten.elu_backward.default: _elementwise,
    _aten.hardsigmoid_backward.default: _elementwise,
    _aten.hardswish_backward.default: _elementwise,
    _aten.hardtanh_backward.default: _elementwise,
    _aten.native_dropout_backward.default: _elementwise,
    _aten.binary_cross_entropy_backward.default: _like_input,
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    _aten.native_layer_norm_backward.default: _contiguous,
    _aten.native_batch_norm.default: _batch_norm,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _batch_norm,
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm,
}
"""Of the first result. Those of weights have one dimension."""


@contextmanager
def kernels_layouts() -> Iterator[None]:
    """Within it, fakes of these operators are laid out as their kernels' results are."""
    table: Any = decomposition_table
    before = {operator: table[operator] for operator in LAYOUTS if operator in table}
    table.update({op: _laid_out(found, LAYOUTS[op]) for op, found in before.items()})
    FakeTensorMode.cache_clear()  # it has what these operators gave before
    try:
        yield
    finally:
        table.update(before)
        FakeTensorMode.cache_clear()


def _laid_out(decomposition: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    @wraps(decomposition)  # torch asks for its module and its name
    def run(*args: Any, **kwargs: Any) -> Any:
        found = decomposition(*args, **kwargs)
        made = found[0] if isinstance(found, tuple) else found
        if made is None:
            return found
        made = layout(made, args)
        return (made, *found[1:]) if isinstance(found, tuple) else made

    return run
