"""Losses: an element-wise loss as large as the input, and its reduction.

The result of some of these operators is the resized element-wise loss: a scalar whose storage is as
large as the input (`STORAGES`).
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    StorageFormula,
    during,
    is_contiguous,
    tensor_bytes,
)
from remat.costs.workspaces.copies import copies_of
from remat.costs.workspaces.reductions import accumulator_bytes, reduction_buffers
from remat.documents.records import TensorMeta

_MEAN = 1


def _element_loss(call: OperatorCall) -> TensorMeta:
    """Return the metadata of the loss of each element, with the shape of both operands."""
    x, y = call.tensor(0), call.tensor(1)
    if x.shape == y.shape and is_contiguous(x):
        return x
    sizes = zip_longest(reversed(x.shape), reversed(y.shape), fillvalue=1)
    shape = tuple(max(pair) for pair in sizes)[::-1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return TensorMeta(dtype=x.dtype, shape=shape, stride=tuple(strides), device=x.device)


def _is_reduced(call: OperatorCall, position: int) -> bool:
    """True if a loss is a mean or a sum."""
    return call.argument(position, _MEAN) != 0


def _sum_buffers(call: OperatorCall, loss: TensorMeta) -> Allocations:
    return reduction_buffers(call, loss, (), accumulator_bytes(loss.dtype))


def _resized_loss(call: OperatorCall, position: int) -> Allocations:
    """A loss whose result is the resized element-wise loss; the mean is of another one."""
    loss = _element_loss(call)
    yield tensor_bytes(loss)
    if _is_reduced(call, position):
        yield from during([tensor_bytes(loss)], _sum_buffers(call, loss))


def _resized_loss_of_mean(call: OperatorCall, position: int) -> Allocations:
    """A loss whose result is the resized element-wise loss, into which its mean is copied."""
    loss = _element_loss(call)
    yield tensor_bytes(loss)
    if _is_reduced(call, position):
        yield from during([sum(call.result_bytes)], _sum_buffers(call, loss))


def _huber_loss(call: OperatorCall) -> Allocations:
    """A loss whose element-wise loss is freed."""
    loss = _element_loss(call)
    yield tensor_bytes(loss)
    if _is_reduced(call, 2):
        yield from call.result_bytes
        yield from _sum_buffers(call, loss)
        yield -tensor_bytes(loss)


def _bce_with_logits(call: OperatorCall) -> Allocations:
    """Binary cross entropy of logits: two element-wise tensors, and one more to weigh positives."""
    loss = _element_loss(call)
    size = tensor_bytes(loss)
    is_reduced = _is_reduced(call, 4)
    yield size
    if call.optional_tensor(3) is not None:
        yield from during([size, size], ())
    reduction = (*call.result_bytes, *_sum_buffers(call, loss)) if is_reduced else ()
    yield from during([size], reduction)
    if is_reduced:
        yield -size


def _soft_margin_backward(call: OperatorCall) -> Allocations:
    """The gradient of the soft margin loss: two tensors as large as the input."""
    size = tensor_bytes(call.tensor(1))
    yield from call.result_bytes
    yield from during([size, size], ())


_RESIZED = {
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
}
"""Operators whose result is the resized element-wise loss, with the position of `reduction`."""


def _loss_storage(call: OperatorCall, position: int) -> tuple[int, ...]:
    """Return the bytes of the storage of a loss: the storage of the element-wise loss."""
    return (tensor_bytes(_element_loss(call)),) if _is_reduced(call, position) else ()


STORAGES: dict[str, StorageFormula] = {
    name: partial(_loss_storage, position=position) for name, position in _RESIZED.items()
}

FORMULAS: dict[str, Formula] = {
    **{
        name: partial(_resized_loss, position=_RESIZED[name])
        for name in ("aten.mse_loss.default", "aten.smooth_l1_loss.default")
    },
    **{
        name: partial(_resized_loss_of_mean, position=_RESIZED[name])
        for name in ("aten.soft_margin_loss.default", "aten.binary_cross_entropy.default")
    },
    "aten.huber_loss.default": _huber_loss,
    "aten.binary_cross_entropy_with_logits.default": _bce_with_logits,
    "aten.soft_margin_loss_backward.default": _soft_margin_backward,
    "aten.nll_loss_forward.default": copies_of(0, 1),
    "aten.nll_loss_backward.default": copies_of(1, 2),
    "aten.nll_loss2d_forward.default": copies_of(0, 1),
}
