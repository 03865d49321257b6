"""Floating point operations of ATen operations, from shapes alone (no torch).

Equal to `torch.utils.flop_counter` where that has a formula (a multiply-add counts as two, causal
masks are not subtracted), and adds attention on CPU. A grouped convolution's weight gradient is
counted as what it does, where torch's formula ignores the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol, runtime_checkable


@runtime_checkable
class Shaped(Protocol):
    """A tensor or a description of one."""

    @property
    def shape(self) -> Sequence[int]: ...


def count_flops(target: str, args: Sequence[object]) -> int:
    """FLOPs of one call. Zero for operations without a formula, which memory bounds anyway.

    `args` are the positional arguments, tensors as anything with a `shape`.
    """
    formula = _FORMULAS.get(target.rpartition(".")[0])
    return formula(args) if formula else 0


def _shape(argument: object) -> Sequence[int]:
    if not isinstance(argument, Shaped):
        raise TypeError(f"expected a tensor, got {argument!r}")
    return argument.shape


def _product(a: Sequence[int], b: Sequence[int]) -> int:
    """a @ b, batched or not."""
    return 2 * prod(a) * b[-1]


def _mm(args: Sequence[object]) -> int:
    return _product(_shape(args[0]), _shape(args[1]))


def _addmm(args: Sequence[object]) -> int:
    return _product(_shape(args[1]), _shape(args[2]))


def _vector(args: Sequence[object]) -> int:
    return 2 * prod(_shape(args[0]))


def _linear(args: Sequence[object]) -> int:
    return 2 * prod(_shape(args[0])) * _shape(args[1])[0]


def _convolved(
    x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool
) -> int:
    """`weight` is (out, in / groups, ...), or (in, out / groups, ...) where transposed."""
    return 2 * prod((x if transposed else out)[2:]) * x[0] * prod(weight)


def _spatial(args: Sequence[object]) -> list[int]:
    """Output shape of `aten.convolution` (its channels are left out: nobody asks)."""
    x, weight = _shape(args[0]), _shape(args[1])
    stride, padding, dilation = (_ints(args[i], len(x) - 2) for i in (3, 4, 5))
    sizes = [
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(len(x) - 2)
    ]
    return [x[0], 0, *sizes]


def _ints(argument: object, count: int) -> list[int]:
    items = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    numbers = [item for item in items if isinstance(item, int)]
    return numbers if len(numbers) == count else numbers * count


def _convolution(args: Sequence[object]) -> int:
    transposed = bool(args[6])
    out = [] if transposed else _spatial(args)
    return _convolved(_shape(args[0]), _shape(args[1]), out, transposed)


def _convolution_backward(args: Sequence[object]) -> int:
    """The gradients of input and weight cost as much as the forward, each."""
    mask = args[10]
    asked = sum(map(bool, mask[:2])) if isinstance(mask, (list, tuple)) else 2
    forward = _convolved(_shape(args[1]), _shape(args[2]), _shape(args[0]), bool(args[7]))
    return asked * forward


def _attention(args: Sequence[object], start: int = 0) -> int:
    """Scores (query, key) and their product with the values."""
    return sum(_attention_parts(args, start))


def _attention_backward(args: Sequence[object]) -> int:
    """Scores again, then gradients of value, probabilities, query and key."""
    scores, values = _attention_parts(args, 1)
    return 3 * scores + 2 * values


def _attention_parts(args: Sequence[object], start: int) -> tuple[int, int]:
    query, key, value = (_shape(args[start + i]) for i in range(3))
    pairs = 2 * prod(query[:-1]) * key[-2]
    return pairs * query[-1], pairs * value[-1]


_FORMULAS: dict[str, Callable[[Sequence[object]], int]] = {
    "aten.mm": _mm,
    "aten.bmm": _mm,
    "aten.addmm": _addmm,
    "aten.baddbmm": _addmm,
    "aten._addmm_activation": _addmm,
    "aten.mv": _vector,
    "aten.dot": _vector,
    "aten.linear": _linear,
    "aten.convolution": _convolution,
    "aten._convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
}
for _kind in (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
):
    _FORMULAS[_kind] = _attention
    _FORMULAS[f"{_kind}_backward"] = _attention_backward
_FORMULAS["aten._scaled_dot_product_flash_attention_for_cpu_backward"] = _attention_backward
