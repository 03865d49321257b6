"""Normalisations and softmax: contiguous copies, and partial sums for the gradients of weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from remat.costs.roofline import item_bytes
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    contiguous_copy_bytes,
    during,
    is_contiguous_layout,
    tensor_bytes,
)
from remat.costs.workspaces.copies import copies_of
from remat.costs.workspaces.reductions import HALF_DTYPES, accumulator_bytes, reduction_buffers
from remat.documents.records import TensorMeta

_MANY_ROWS = 64 * 1024
"""Rows above which the gradients of the weights of a layer norm are summed in two steps."""
_ROWS_OF_A_SUM = 32
_MAX_SUM_BLOCKS = 32768
"""Thread blocks of 32 columns that write partial sums."""


def _layer_norm_backward(call: OperatorCall) -> Allocations:
    """The backward of layer norm and RMS norm. With many short rows, the gradients of weight and
    bias are sums of partial sums over 32 rows each."""
    grad, x = call.tensor(0), call.tensor(1)
    axes = call.argument(2)
    width = prod(axis for axis in axes if isinstance(axis, int)) if isinstance(axes, tuple) else 1
    rows = prod(x.shape) // max(width, 1)
    is_short = width // 32 < call.device.multiprocessors // 2
    mask = call.argument(len(call.args) - 1)
    weight_gradients = sum(map(bool, mask[1:])) if isinstance(mask, tuple) else 0
    copies = [contiguous_copy_bytes(grad), contiguous_copy_bytes(x)]

    def inner() -> Iterator[int]:
        yield from call.result_bytes
        if rows <= _MANY_ROWS or not is_short:
            return
        partial = TensorMeta(
            dtype=x.dtype,
            shape=(min(-(-rows // _ROWS_OF_A_SUM), _MAX_SUM_BLOCKS // -(-width // 32)), width),
            stride=(width, 1),
            device=x.device,
        )

        def sums() -> Iterator[int]:
            row_bytes = width * item_bytes(x.dtype)
            for _ in range(weight_gradients):
                # The sum replaces the result that was allocated for it.
                buffers = reduction_buffers(call, partial, (0,), accumulator_bytes(x.dtype))
                yield from during([row_bytes], buffers)

        yield from during([tensor_bytes(partial)] * weight_gradients, sums())

    yield from during(copies, inner())


def _group_norm(call: OperatorCall) -> Allocations:
    """Group norm: a scale and a shift for each channel of each sample, in float32."""
    x = call.tensor(0)
    batch, channels, area, groups = (call.integer(i) for i in (3, 4, 5, 6))
    item = accumulator_bytes(x.dtype)
    yield from call.result_bytes
    buffers = [contiguous_copy_bytes(x)]
    if x.dtype in HALF_DTYPES:
        buffers += [item * batch * groups] * 2  # the statistics, before they are rounded
    if area > 1 and not (call.argument(1) is None and call.argument(2) is None):
        buffers += [item * batch * channels] * 2
    yield from during(buffers, ())


def _group_norm_backward(call: OperatorCall) -> Allocations:
    """The backward of group norm: sums over each channel, and coefficients for each group."""
    grad, x = call.tensor(0), call.tensor(1)
    batch, channels, area, groups = (call.integer(i) for i in (5, 6, 7, 8))
    item = accumulator_bytes(x.dtype)
    by_group, by_channel = item * batch * groups, item * batch * channels
    yield from call.result_bytes
    buffers = [contiguous_copy_bytes(grad), contiguous_copy_bytes(x), by_group, by_group]
    if area > 1:
        buffers += [by_channel] * (3 if call.argument(4) is not None else 2)
    yield from during(buffers, ())


def _is_channels_last(x: TensorMeta) -> bool:
    """True if an image batch is stored with its channels as the fastest dimension."""
    order = (0, *range(2, len(x.shape)), 1)
    shape, stride = [x.shape[d] for d in order], [x.stride[d] for d in order]
    return len(x.shape) > 3 and is_contiguous_layout(shape, stride)


def _batch_norm_sums_bytes(x: TensorMeta, statistics: int) -> int:
    """Return the bytes of the partial sums of torch's own batch norm for channels-last images, of
    `statistics` sums for each channel."""
    channels = x.shape[1]
    rows = prod(x.shape) // max(channels, 1)
    block_width = min(1 << (channels.bit_length() - 1), 32)
    needed_rows = max(1, -(-rows // 16))
    block_height = min(1 << (needed_rows.bit_length() - 1), 512 // block_width)
    blocks = min(-(-rows // (block_height * 16)), 128)
    return statistics * channels * blocks * accumulator_bytes(x.dtype) if blocks >= 8 else 0


def _batch_norm(call: OperatorCall) -> Allocations:
    """torch's own batch norm in training: partial sums for channels-last images."""
    x = call.tensor(0)
    yield from call.result_bytes
    sums = _batch_norm_sums_bytes(x, 4)
    if call.argument(5) is True and _is_channels_last(x) and sums:
        yield from during([sums, 4 * -(-x.shape[1] // 32)], ())


def _batch_norm_backward(call: OperatorCall) -> Allocations:
    """torch's own batch norm: two sums for each channel."""
    x = call.tensor(1)
    sums = accumulator_bytes(x.dtype) * x.shape[1] if _is_channels_last(x) else 0
    yield from (*[sums] * 2, *call.result_bytes, *[-sums] * 2)


def _softmax_backward(call: OperatorCall) -> Allocations:
    """The gradient of softmax: the product of gradient and output, next to their copies."""
    grad, output = call.tensor(0), call.tensor(1)
    yield from call.result_bytes
    copies = [contiguous_copy_bytes(grad), contiguous_copy_bytes(output)]
    yield from during([tensor_bytes(grad), *copies], ())


FORMULAS: dict[str, Formula] = {
    "aten.native_layer_norm.default": copies_of(0),
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": copies_of(0),
    "aten._fused_rms_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.batch_norm_backward.default": _batch_norm_backward,
    "aten._softmax.default": copies_of(0),
    "aten._log_softmax.default": copies_of(0),
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": copies_of(0, 1),
}
