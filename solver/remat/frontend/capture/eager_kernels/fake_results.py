"""Corrections of fake tensors whose strides or dtype differ from the kernel's result.

**Strides.** The fake results of some operators come from decompositions. Where the arguments differ
in layout, these lay out their result differently from the kernels. A capture then records a view of
a gradient where only a copy is possible, and the first step fails: "view size is not compatible
with input tensor's size and stride". (Seen in torch 2.13 and 2.15 with `softplus_backward`; torch's
own aot_eager backend fails the same way.) During a capture these operators get the kernels'
layouts.

**Dtypes** of normalizations of bfloat16 and float16 inputs with float32 weights, as under autocast.
On the CPU their statistics have the dtype of the weights; their fake tensors have that of the
input. (Seen in torch 2.13.) On CUDA the statistics are float32, whatever the dtype of the weights.
A fake tensor on CUDA says so; but in a capture for an absent GPU the fake tensors are on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses import FakeTensorMode

from remat.frontend.common.target_gpu import TargetGpu

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


def fake_in_copied_storage(base: torch.Tensor) -> torch.Tensor:
    """Return the fake result of an operator of `STORAGE_COPIES` whose first argument is `base`: a
    tensor of the same layout, in a storage as large as `base` has."""
    if torch._debug_has_internal_overlap(base) == 1:
        return torch.empty_like(base)
    elements = base.untyped_storage().nbytes() // base.element_size()
    copied = base.new_empty((elements,))
    return copied.as_strided(base.shape, base.stride(), base.storage_offset())


def _contiguous_layout(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Return the result in the contiguous layout: a `LayoutRule`."""
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _pointwise_layout(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Return the result with the strides that a pointwise kernel gives it: a `LayoutRule`. They
    depend on every argument that has the result's shape; broadcast arguments do not count."""
    operands = [a for a in args if isinstance(a, torch.Tensor) and a.shape == result.shape]
    strides = compute_elementwise_output_strides(*operands)
    return result.new_empty_strided(result.shape, strides)


def _input_layout(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Return the result in the layout of the second argument, the input of a backward operator: a
    `LayoutRule`."""
    return torch.empty_like(args[1], dtype=result.dtype)


def _batch_norm_layout(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Return the result in the memory format of the input, channels-last or contiguous, as the
    CPU's kernels do; unchanged on another device. A `LayoutRule`."""
    operand = next(
        a for a in args[1::-1] if isinstance(a, torch.Tensor) and a.shape == result.shape
    )
    if result.device.type != "cpu":
        return result
    return torch.empty_like(result, memory_format=suggest_memory_format(operand))


KERNEL_LAYOUTS: dict[Any, LayoutRule] = {
    _aten.softplus_backward.default: _pointwise_layout,
    _aten.elu_backward.default: _pointwise_layout,
    _aten.hardsigmoid_backward.default: _pointwise_layout,
    _aten.hardswish_backward.default: _pointwise_layout,
    _aten.hardtanh_backward.default: _pointwise_layout,
    _aten.native_dropout_backward.default: _pointwise_layout,
    _aten.binary_cross_entropy_backward.default: _input_layout,
    _aten._log_softmax_backward_data.default: _contiguous_layout,
    _aten.huber_loss_backward.default: _contiguous_layout,
    _aten.mse_loss_backward.default: _contiguous_layout,
    _aten.smooth_l1_loss_backward.default: _contiguous_layout,
    _aten.native_layer_norm_backward.default: _contiguous_layout,
    _aten.native_batch_norm.default: _batch_norm_layout,
    _aten._native_batch_norm_legit.default: _batch_norm_layout,
    _aten._native_batch_norm_legit.no_stats: _batch_norm_layout,
    _aten._native_batch_norm_legit_functional.default: _batch_norm_layout,
    _aten.native_batch_norm_backward.default: _batch_norm_layout,
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
            operator: _decomposition_with_layout(decomposition, KERNEL_LAYOUTS[operator])
            for operator, decomposition in originals.items()
        }
    )
    FakeTensorMode.cache_clear()  # it has the results of the original decompositions
    try:
        yield
    finally:
        table.update(originals)
        FakeTensorMode.cache_clear()


def _decomposition_with_layout(
    decomposition: Callable[..., Any], rule: LayoutRule
) -> Callable[..., Any]:
    """Return a decomposition whose first result, unless it is None, has the layout of a rule."""

    @wraps(decomposition)  # torch reads its `__module__` and `__name__`
    def run(*args: Any, **kwargs: Any) -> Any:
        results = decomposition(*args, **kwargs)
        first = results[0] if isinstance(results, tuple) else results
        if first is None:
            return results
        first = rule(first, args)
        return (first, *results[1:]) if isinstance(results, tuple) else first

    return run


_CPU_DTYPE_ARGUMENTS: Mapping[str, Mapping[int, int]] = {
    "aten.native_layer_norm.default": {1: 2, 2: 2},
    "aten.native_group_norm.default": {1: 1, 2: 1},
    "aten.native_group_norm_backward.default": {0: 1},
    "aten._native_batch_norm_legit_functional.default": {1: 1, 2: 1, 3: 3, 4: 4},
}
"""By operator: on the CPU, the index of the argument whose dtype a result has, by the result's
index."""

_CUDA_FLOAT32_RESULTS: Mapping[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (1, 2),
    "aten._batch_norm_with_update_functional.default": (1, 2),
    "aten._native_batch_norm_legit_functional.default": (1, 2),
    "aten._native_batch_norm_legit.no_stats": (1, 2),
}
"""By operator: on CUDA, the indices of the results that are float32 where the input is narrower."""


def correct_fake_dtypes(graph: fx.Graph, target: TargetGpu | None = None) -> None:
    """Give the fake tensors of a graph the dtypes that the kernels return, on their own device or
    on the absent GPU `target`. That includes the copies that autograd saves."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        producer = node.args[0] if node.args else None
        if producer in corrected and node.target is operator.getitem:
            node.meta["val"] = producer.meta["val"][node.args[1]]
        elif producer in corrected and str(node.target) == "aten.detach.default":
            node.meta["val"] = producer.meta["val"].detach()
        elif target is not None and (wide := _CUDA_FLOAT32_RESULTS.get(str(node.target))):
            node.meta["val"] = _with_float32_results(node, wide)
        elif target is None and (dtype_of := _CPU_DTYPE_ARGUMENTS.get(str(node.target))):
            node.meta["val"] = _with_argument_dtypes(node, dtype_of)
        else:
            continue
        corrected.add(node)


def _with_argument_dtypes(node: fx.Node, dtype_of: Mapping[int, int]) -> tuple[object, ...]:
    """Return the node's fake results; CPU results listed in `dtype_of` get an argument's dtype."""
    fakes = list(node.meta["val"])
    for position, argument_index in dtype_of.items():
        fake, argument = fakes[position], node.args[argument_index]
        if fake is not None and fake.device.type == "cpu" and isinstance(argument, fx.Node):
            fakes[position] = fake.to(argument.meta["val"].dtype)
    return tuple(fakes)


def _with_float32_results(node: fx.Node, positions: tuple[int, ...]) -> tuple[object, ...]:
    """Return the node's fake results; 16-bit ones at these positions become float32."""
    fakes = list(node.meta["val"])
    for position in positions:
        if fakes[position].dtype in (torch.bfloat16, torch.float16):
            fakes[position] = fakes[position].to(torch.float32)
    return tuple(fakes)
