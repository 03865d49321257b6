"""Floating point operations of ATen operations, from shapes only (without torch).

The numbers equal those of `torch.utils.flop_counter` where it has a formula (a multiply-add counts
as two, causal masks are not subtracted), plus attention on the CPU. One exception is the weight
gradient of a grouped convolution: torch's formula ignores the groups, this one counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol, runtime_checkable


@runtime_checkable
class HasShape(Protocol):
    """Any object with a `shape`: a tensor, or the metadata of one."""

    @property
    def shape(self) -> Sequence[int]: ...


def count_flops(target: str, args: Sequence[object]) -> int:
    """Return the FLOPs of one call. Zero for operations without a formula, which are memory-bound.

    `args` are the positional arguments, with any object with a `shape` for a tensor.
    """
    formula = _FORMULAS.get(target.rpartition(".")[0])
    return formula(args) if formula else 0


def _shape(argument: object) -> Sequence[int]:
    if not isinstance(argument, HasShape):
        raise TypeError(f"expected a tensor, got {argument!r}")
    return argument.shape


def _matmul_flops(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the FLOPs of `a @ b` for these shapes, batched or not."""
    return 2 * prod(a) * b[-1]


def _mm(args: Sequence[object]) -> int:
    return _matmul_flops(_shape(args[0]), _shape(args[1]))


def _addmm(args: Sequence[object]) -> int:
    return _matmul_flops(_shape(args[1]), _shape(args[2]))


def _matrix_vector(args: Sequence[object]) -> int:
    return 2 * prod(_shape(args[0]))


def _linear(args: Sequence[object]) -> int:
    return 2 * prod(_shape(args[0])) * _shape(args[1])[0]


def _convolution_flops(
    x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool
) -> int:
    """Return the FLOPs of a convolution with these shapes; `weight` is (out, in / groups, ...), or
    (in, out / groups, ...) if transposed."""
    return 2 * prod((x if transposed else out)[2:]) * x[0] * prod(weight)


def _convolution_output_shape(args: Sequence[object]) -> list[int]:
    """Return the output shape of `aten.convolution`, with 0 channels, which no formula reads."""
    x, weight = _shape(args[0]), _shape(args[1])
    stride, padding, dilation = (_int_list(args[i], len(x) - 2) for i in (3, 4, 5))
    sizes = [
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(len(x) - 2)
    ]
    return [x[0], 0, *sizes]


def _int_list(argument: object, count: int) -> list[int]:
    """Return an argument as a list of `count` integers; a single integer is repeated."""
    items = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    integers = [item for item in items if isinstance(item, int)]
    return integers if len(integers) == count else integers * count


def _convolution(args: Sequence[object]) -> int:
    transposed = bool(args[6])
    out = [] if transposed else _convolution_output_shape(args)
    return _convolution_flops(_shape(args[0]), _shape(args[1]), out, transposed)


def _convolution_backward(args: Sequence[object]) -> int:
    """Return the FLOPs of a convolution's backward: those of the forward for the gradient of the
    input, and as many for that of the weight."""
    output_mask = args[10]
    gradient_count = 2
    if isinstance(output_mask, (list, tuple)):
        gradient_count = sum(map(bool, output_mask[:2]))
    x, weight, out = _shape(args[1]), _shape(args[2]), _shape(args[0])
    return gradient_count * _convolution_flops(x, weight, out, bool(args[7]))


def _attention(args: Sequence[object], start: int = 0) -> int:
    """Return the FLOPs of attention: query times key, and probabilities times value."""
    return sum(_attention_matmuls(args, start))


def _attention_backward(args: Sequence[object]) -> int:
    """Return the FLOPs of attention's backward: the recomputed scores, and the gradients of value,
    probabilities, query and key."""
    score_flops, value_flops = _attention_matmuls(args, 1)
    return 3 * score_flops + 2 * value_flops


def _attention_matmuls(args: Sequence[object], start: int) -> tuple[int, int]:
    """Return the FLOPs of query times key and of probabilities times value; query, key and value
    are the arguments from `start` on."""
    query, key, value = (_shape(args[start + i]) for i in range(3))
    score_elements = prod(query[:-1]) * key[-2]
    return 2 * score_elements * query[-1], 2 * score_elements * value[-1]


_FORMULAS: dict[str, Callable[[Sequence[object]], int]] = {
    "aten.mm": _mm,
    "aten.bmm": _mm,
    "aten.addmm": _addmm,
    "aten.baddbmm": _addmm,
    "aten._addmm_activation": _addmm,
    "remat.add_product": _addmm,
    "aten.mv": _matrix_vector,
    "aten.dot": _matrix_vector,
    "aten.linear": _linear,
    "aten.convolution": _convolution,
    "aten._convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
for _target in (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
):
    _FORMULAS[_target] = _attention
    _FORMULAS[f"{_target}_backward"] = _attention_backward
