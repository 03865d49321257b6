"""Corrections of fake tensors whose strides differ from the kernel's result.

The fake results of some operators come from decompositions. Where the arguments differ in layout,
these lay out their result differently from the kernels. A capture then records a view of a gradient
where only a copy is possible, and the first step fails: "view size is not compatible with input
tensor's size and stride". (Seen in torch 2.13 and 2.15 with `softplus_backward`; torch's own
aot_eager backend fails the same way.) During a capture these operators get the kernels' layouts.
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

LayoutRule = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""Takes a fake result and the operator's arguments; returns an empty tensor of the same shape and
dtype in the kernel's layout."""


_aten = torch.ops.aten

STORAGE_COPIES = frozenset(
    {
        _aten.slice_scatter.default,
        _aten.select_scatter.default,
        _aten.diagonal_scatter.default,
    }
)
"""Operators whose kernels copy the whole storage of their first argument, and write into the copy.
Fake results have a storage that ends with their last element: of a view, it is smaller."""


def in_copied_storage(base: torch.Tensor) -> torch.Tensor:
    """Return the fake result of an operator of `STORAGE_COPIES` for its first argument."""
    if torch._debug_has_internal_overlap(base) == 1:
        return torch.empty_like(base)
    elements = base.untyped_storage().nbytes() // base.element_size()
    copied = base.new_empty((elements,))
    return copied.as_strided(base.shape, base.stride(), base.storage_offset())


def _contiguous(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _elementwise(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Use the strides that a pointwise kernel gives its result. They depend on every argument that
    has the result's shape; broadcast arguments do not count."""
    operands = [a for a in args if isinstance(a, torch.Tensor) and a.shape == result.shape]
    strides = compute_elementwise_output_strides(*operands)
    return result.new_empty_strided(result.shape, strides)


def _like_input(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Use the layout of the second argument, the input of a backward operator."""
    return torch.empty_like(args[1], dtype=result.dtype)


def _batch_norm(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Use the memory format of the input, channels-last or contiguous, as the CPU's kernels do."""
    operand = next(
        a for a in args[1::-1] if isinstance(a, torch.Tensor) and a.shape == result.shape
    )
    if result.device.type != "cpu":
        return result
    return torch.empty_like(result, memory_format=suggest_memory_format(operand))


KERNEL_LAYOUTS: dict[Any, LayoutRule] = {
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
"""The layout of each operator's first result. Its other results belong to weights and have one
dimension."""


@contextmanager
def fakes_with_kernel_layouts() -> Iterator[None]:
    """Within the context, lay out the fake results of `KERNEL_LAYOUTS`' operators as the kernels
    do."""
    table: Any = decomposition_table
    originals = {operator: table[operator] for operator in KERNEL_LAYOUTS if operator in table}
    table.update(
        {
            operator: _with_layout(decomposition, KERNEL_LAYOUTS[operator])
            for operator, decomposition in originals.items()
        }
    )
    FakeTensorMode.cache_clear()  # it has the results of the original decompositions
    try:
        yield
    finally:
        table.update(originals)
        FakeTensorMode.cache_clear()


def _with_layout(decomposition: Callable[..., Any], rule: LayoutRule) -> Callable[..., Any]:
    """Wrap a decomposition so that its first result gets the layout of a rule."""

    @wraps(decomposition)  # torch reads its `__module__` and `__name__`
    def run(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        first = results[0] if isinstance(results, tuple) else results
        if first is None:
            return results
        first = rule(first, args)
        return (first, *results[1:]) if isinstance(results, tuple) else first

    return run
