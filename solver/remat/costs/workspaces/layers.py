"""Matrix products, pooling, normalisations, softmax and losses.

Many kernels copy operands whose layout they do not support. Matrix products copy an operand without
a dense row or column, such as an expanded one. Pooling and resizing copy images that are neither
contiguous nor channels-last, others need contiguous ones.

The result of some losses is the resized element-wise loss: a scalar whose storage is as large as
the input (`STORAGES`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import cast

from remat.costs.layouts import (
    HALF_DTYPES,
    channels_last_order,
    dense_meta,
    is_contiguous,
    is_contiguous_in_order,
    item_bytes,
    tensor_bytes,
)
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    StorageFormula,
    buffers_during,
    contiguous_copy_bytes,
    results_and_buffers,
)
from remat.costs.workspaces.reductions import accumulator_bytes, reduction_buffers
from remat.documents.records import TensorMeta

_FLOAT_BYTES = 4

# -- copies of operands ---------------------------------------------------------------------

CopyBytes = Callable[[TensorMeta], int]
"""A function that returns the bytes of the copy of an operand, 0 if it needs none."""


def _image_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy of an image batch for kernels that need it contiguous or
    channels-last: 0 if it is either."""
    is_supported = is_contiguous(meta) or is_contiguous_in_order(meta, channels_last_order(meta))
    return 0 if is_supported else tensor_bytes(meta)


def _matrix_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy of a matrix for cuBLAS: 0 if its rows or its columns are dense
    and do not overlap. The dimensions before the last two do not count."""
    rows, columns = meta.shape[-2:]
    row_stride, column_stride = meta.stride[-2:]
    is_row_major = column_stride == 1 and row_stride >= max(1, columns)
    is_column_major = row_stride == 1 and column_stride >= max(1, rows)
    return 0 if is_row_major or is_column_major else tensor_bytes(meta)


def _vector_copy_bytes(meta: TensorMeta) -> int:
    """Return the bytes of the copy of a vector for cuBLAS: 0 unless it is expanded."""
    return tensor_bytes(meta) if 0 in meta.stride and meta.shape[0] > 1 else 0


_dense_copy_bytes = contiguous_copy_bytes

_COPIES: Mapping[str, Mapping[int, CopyBytes]] = {
    "mm.default": {0: _matrix_copy_bytes, 1: _matrix_copy_bytes},
    "mm.dtype": {0: _matrix_copy_bytes, 1: _matrix_copy_bytes},
    "bmm.default": {0: _matrix_copy_bytes, 1: _matrix_copy_bytes},
    "bmm.dtype": {0: _matrix_copy_bytes, 1: _matrix_copy_bytes},
    "addmm.default": {1: _matrix_copy_bytes, 2: _matrix_copy_bytes},
    "baddbmm.default": {1: _matrix_copy_bytes, 2: _matrix_copy_bytes},
    "_addmm_activation.default": {1: _matrix_copy_bytes, 2: _matrix_copy_bytes},
    "mv.default": {0: _matrix_copy_bytes, 1: _vector_copy_bytes},
    "addmv.default": {1: _matrix_copy_bytes, 2: _vector_copy_bytes},
    "avg_pool2d.default": {0: _image_copy_bytes},
    "avg_pool2d_backward.default": {0: _image_copy_bytes, 1: _image_copy_bytes},
    "_adaptive_avg_pool2d.default": {0: _image_copy_bytes},
    "_adaptive_avg_pool2d_backward.default": {0: _image_copy_bytes},
    "max_pool2d_with_indices.default": {0: _image_copy_bytes},
    "max_pool2d_with_indices_backward.default": {
        0: _image_copy_bytes,
        1: _image_copy_bytes,
        7: _image_copy_bytes,
    },
    "upsample_nearest2d.default": {0: _image_copy_bytes},
    "upsample_nearest2d_backward.default": {0: _image_copy_bytes},
    "upsample_bilinear2d_backward.default": {0: _image_copy_bytes},
    "upsample_bicubic2d_backward.default": {0: _dense_copy_bytes},
    "reflection_pad2d.default": {0: _dense_copy_bytes},
    "reflection_pad2d_backward.default": {0: _dense_copy_bytes},
    "native_layer_norm.default": {0: _dense_copy_bytes},
    "_fused_rms_norm.default": {0: _dense_copy_bytes},
    "_softmax.default": {0: _dense_copy_bytes},
    "_log_softmax.default": {0: _dense_copy_bytes},
    "_log_softmax_backward_data.default": {0: _dense_copy_bytes, 1: _dense_copy_bytes},
    "nll_loss_forward.default": {0: _dense_copy_bytes, 1: _dense_copy_bytes},
    "nll_loss_backward.default": {1: _dense_copy_bytes, 2: _dense_copy_bytes},
    "nll_loss2d_forward.default": {0: _dense_copy_bytes, 1: _dense_copy_bytes},
}
"""By operator: how the operands at some positions are copied, while the results exist."""


def _operand_copy_bytes(call: OperatorCall, copies: Mapping[int, CopyBytes]) -> Iterator[int]:
    """Yield the bytes of the copies of operands; `copies` has a function for each position."""
    for position, copy_bytes in copies.items():
        if (meta := call.optional_tensor(position)) is not None:
            yield copy_bytes(meta)


def _adaptive_max_pool_workspace(call: OperatorCall) -> Iterator[int]:
    """Yield the copies of adaptive max pooling: the operand, if it is not contiguous, and each
    result that is not, for an image in a supported format."""
    x = call.tensor(0)
    yield contiguous_copy_bytes(x)
    for result in call.results if _image_copy_bytes(x) == 0 else ():
        yield contiguous_copy_bytes(result.tensor)


def _roll_workspace(call: OperatorCall) -> list[int]:
    """Return the buffer of a roll, which rolls dimensions one after the other: an intermediate
    tensor for several dimensions, or a contiguous copy for one."""
    x, dims = call.tensor(0), call.argument(2, ())
    count = len(dims) if isinstance(dims, (list, tuple)) else 1
    return [tensor_bytes(x)] if count > 1 else [contiguous_copy_bytes(x)]


def _im2col_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of unfolding an image: a tensor of its size, and a contiguous copy unless
    it is contiguous."""
    x = call.tensor(0)
    return [tensor_bytes(x), contiguous_copy_bytes(x)]


def _grouped_matmul_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of a product of several groups of matrices: pointers and shapes of each
    group, and descriptors for each multiprocessor. Recorded for Hopper."""
    offsets = call.optional_tensor(2)
    groups = offsets.shape[0] if offsets is not None else call.tensor(0).shape[0]
    return [60 * groups, 512 * call.device.multiprocessors]


# -- products with quantized weights (bitsandbytes 0.50, backends/cuda/ops.py) ---------------


def _gemm_4bit_allocations(call: OperatorCall) -> Allocations:
    """Yield the allocations of a product with a weight in 4 bits: the dequantized weight, after its
    scales, if these are in 8 bits. A kernel for few rows (up to 1,536) would need neither."""
    rows, columns = cast("Sequence[int]", call.argument(2))
    buffers = [rows * columns * item_bytes(call.tensor(0).dtype)]
    scales = call.kwargs.get("absmax_8bit")
    if isinstance(scales, TensorMeta):
        buffers = [_FLOAT_BYTES * prod(scales.shape)] * 2 + buffers
    yield from buffers_during(buffers, call.result_bytes)


def _int8_scaled_mm_allocations(call: OperatorCall) -> Allocations:
    """Yield the allocations of a product of integers in 8 bits: sums in 32 bits, and the result in
    float16 if it has another dtype."""
    (result,) = call.results
    elements = prod(result.tensor.shape)
    copies = [] if result.tensor.dtype == "float16" else [2 * elements]
    yield from buffers_during([_FLOAT_BYTES * elements, *copies], call.result_bytes)


# -- normalisations and softmax: partial sums for the gradients of weights ------------------

_MANY_ROWS = 64 * 1024
"""Rows above which the gradients of the weights of a layer norm are summed in two steps."""
_ROWS_OF_A_SUM = 32
_MAX_SUM_BLOCKS = 32768
"""Thread blocks of 32 columns that write partial sums."""


def _layer_norm_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the backward of layer norm and RMS norm: contiguous copies, and with
    many short rows partial sums over 32 rows each for the gradients of weight and bias."""
    grad, x = call.tensor(0), call.tensor(1)
    axes = call.argument(2)
    width = prod(axis for axis in axes if isinstance(axis, int)) if isinstance(axes, tuple) else 1
    rows = prod(x.shape) // max(width, 1)
    is_short = width // 32 < call.device.multiprocessors // 2
    mask = call.argument(len(call.args) - 1)
    weight_gradients = sum(map(bool, mask[1:])) if isinstance(mask, tuple) else 0

    def inner() -> Iterator[int]:
        yield from call.result_bytes
        if rows <= _MANY_ROWS or not is_short:
            return
        sum_count = min(-(-rows // _ROWS_OF_A_SUM), _MAX_SUM_BLOCKS // -(-width // 32))
        partial_sums = dense_meta(x, (sum_count, width))

        def sums() -> Iterator[int]:
            for _ in range(weight_gradients):
                # The sum replaces the result that was allocated for it.
                buffers = reduction_buffers(call, partial_sums, (0,), accumulator_bytes(x.dtype))
                yield from buffers_during([width * item_bytes(x.dtype)], buffers)

        yield from buffers_during([tensor_bytes(partial_sums)] * weight_gradients, sums())

    yield from buffers_during([contiguous_copy_bytes(grad), contiguous_copy_bytes(x)], inner())


def _group_norm_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of group norm: a contiguous copy, statistics of half precision in float32,
    and a scale and a shift for each channel of each sample, if there is a weight or a bias."""
    x = call.tensor(0)
    batch, channels, area, groups = (call.integer(i) for i in (3, 4, 5, 6))
    item = accumulator_bytes(x.dtype)
    buffers = [contiguous_copy_bytes(x)]
    if x.dtype in HALF_DTYPES:
        buffers += [item * batch * groups] * 2  # the statistics, before they are rounded
    if area > 1 and not (call.argument(1) is None and call.argument(2) is None):
        buffers += [item * batch * channels] * 2
    return buffers


def _group_norm_backward_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of the backward of group norm: contiguous copies, coefficients for each
    group, and sums over each channel of more than one pixel."""
    grad, x = call.tensor(0), call.tensor(1)
    batch, channels, area, groups = (call.integer(i) for i in (5, 6, 7, 8))
    item = accumulator_bytes(x.dtype)
    by_group, by_channel = item * batch * groups, item * batch * channels
    buffers = [contiguous_copy_bytes(grad), contiguous_copy_bytes(x), by_group, by_group]
    if area > 1:
        buffers += [by_channel] * (3 if call.argument(4) is not None else 2)
    return buffers


def _is_channels_last(x: TensorMeta) -> bool:
    """True if an image batch is stored with its channels as the fastest dimension."""
    return len(x.shape) > 3 and is_contiguous_in_order(x, channels_last_order(x))


def _batch_norm_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of torch's own batch norm: in training, partial sums for each channel of
    channels-last images with many rows; else none."""
    x = call.tensor(0)
    if call.argument(5) is not True or not _is_channels_last(x):
        return []
    channels = x.shape[1]
    rows = prod(x.shape) // max(channels, 1)
    block_width = min(1 << (channels.bit_length() - 1), 32)
    needed_rows = max(1, -(-rows // 16))
    block_height = min(1 << (needed_rows.bit_length() - 1), 512 // block_width)
    blocks = min(-(-rows // (block_height * 16)), 128)
    if blocks < 8:
        return []
    return [4 * channels * blocks * accumulator_bytes(x.dtype), 4 * -(-channels // 32)]


def _batch_norm_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the backward of torch's own batch norm: two sums for each channel of
    channels-last images."""
    x = call.tensor(1)
    sums = accumulator_bytes(x.dtype) * x.shape[1] if _is_channels_last(x) else 0
    yield from buffers_during([sums] * 2, call.result_bytes)


def _softmax_backward_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of the gradient of softmax: the product of gradient and output, and
    contiguous copies of both."""
    grad, output = call.tensor(0), call.tensor(1)
    return [tensor_bytes(grad), contiguous_copy_bytes(grad), contiguous_copy_bytes(output)]


# -- losses: an element-wise loss as large as the input, and its reduction ------------------

_MEAN = 1


def _elementwise_loss_meta(call: OperatorCall) -> TensorMeta:
    """Return the metadata of the element-wise loss: its shape is both operands' after
    broadcasting."""
    x, y = call.tensor(0), call.tensor(1)
    if x.shape == y.shape and is_contiguous(x):
        return x
    sizes = zip_longest(reversed(x.shape), reversed(y.shape), fillvalue=1)
    return dense_meta(x, tuple(max(pair) for pair in sizes)[::-1])


def _is_reduced_loss(call: OperatorCall, position: int) -> bool:
    """True if a loss is a mean or a sum, by its argument `reduction` at this position."""
    return call.argument(position, _MEAN) != 0


def _loss_reduction_buffers(call: OperatorCall, loss: TensorMeta) -> Allocations:
    """Yield the buffers of the mean or sum of an element-wise loss."""
    return reduction_buffers(call, loss, (), accumulator_bytes(loss.dtype))


def _resized_loss_workspace(call: OperatorCall, position: int, is_copied: bool) -> Allocations:
    """Yield the allocations of a loss whose result is the resized element-wise loss. `position` is
    the one of the argument `reduction`. A mean or sum is over a second element-wise loss, or if
    `is_copied`, it is computed apart and copied into the result."""
    loss = _elementwise_loss_meta(call)
    yield tensor_bytes(loss)
    if _is_reduced_loss(call, position):
        other = sum(call.result_bytes) if is_copied else tensor_bytes(loss)
        yield from buffers_during([other], _loss_reduction_buffers(call, loss))


def _huber_loss_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the Huber loss: its element-wise loss is freed if it is reduced."""
    loss = _elementwise_loss_meta(call)
    if not _is_reduced_loss(call, 2):
        return [tensor_bytes(loss)]
    return buffers_during(
        [tensor_bytes(loss)], (*call.result_bytes, *_loss_reduction_buffers(call, loss))
    )


def _bce_with_logits_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of binary cross entropy of logits: two element-wise tensors, and two
    more for a while if positives have a weight."""
    loss = _elementwise_loss_meta(call)
    size = tensor_bytes(loss)
    is_reduced = _is_reduced_loss(call, 4)
    yield size
    if call.optional_tensor(3) is not None:
        yield from buffers_during([size, size])
    reduction = (*call.result_bytes, *_loss_reduction_buffers(call, loss)) if is_reduced else ()
    yield from buffers_during([size], reduction)
    if is_reduced:
        yield -size


def _soft_margin_backward_workspace(call: OperatorCall) -> list[int]:
    """Return the buffers of the gradient of the soft margin loss: two tensors as large as the
    input."""
    return [tensor_bytes(call.tensor(1))] * 2


_RESIZED_LOSSES = {
    "aten.mse_loss.default": (2, False),
    "aten.smooth_l1_loss.default": (2, False),
    "aten.soft_margin_loss.default": (2, True),
    "aten.binary_cross_entropy.default": (3, True),
}
"""Operators whose result is the resized element-wise loss: the position of `reduction`, and True if
the mean is copied into that loss."""


def _loss_storage(call: OperatorCall, position: int) -> tuple[int, ...]:
    """Return the bytes of the storage of a mean or sum: as many as of the element-wise loss. () for
    a loss that is not reduced. `position` is the one of the argument `reduction`."""
    return (tensor_bytes(_elementwise_loss_meta(call)),) if _is_reduced_loss(call, position) else ()


def _col2im_storage(call: OperatorCall) -> tuple[int, ...]:
    """Return the bytes of the storage of a folded image, which is as large as the columns that it
    is folded from."""
    return (tensor_bytes(call.tensor(0)),)


STORAGES: dict[str, StorageFormula] = {
    "aten.col2im.default": _col2im_storage,
    **{
        name: partial(_loss_storage, position=position)
        for name, (position, _) in _RESIZED_LOSSES.items()
    },
}

_BUFFERS: Mapping[str, Callable[[OperatorCall], Iterable[int]]] = {
    "aten.adaptive_max_pool2d.default": _adaptive_max_pool_workspace,
    "aten.roll.default": _roll_workspace,
    "aten.im2col.default": _im2col_workspace,
    "aten._grouped_mm.default": _grouped_matmul_workspace,
    "aten.native_group_norm.default": _group_norm_workspace,
    "aten.native_group_norm_backward.default": _group_norm_backward_workspace,
    "aten.native_batch_norm.default": _batch_norm_workspace,
    "aten._softmax_backward_data.default": _softmax_backward_workspace,
    "aten.soft_margin_loss_backward.default": _soft_margin_backward_workspace,
    **{f"aten.{n}": partial(_operand_copy_bytes, copies=copies) for n, copies in _COPIES.items()},
}
"""The buffers of operators, all of which exist at once with the results."""

FORMULAS: dict[str, Formula] = {
    **{name: results_and_buffers(buffers) for name, buffers in _BUFFERS.items()},
    "bitsandbytes.gemm_4bit.default": _gemm_4bit_allocations,
    "bitsandbytes.int8_scaled_mm.default": _int8_scaled_mm_allocations,
    "aten.native_layer_norm_backward.default": _layer_norm_backward_workspace,
    "aten._fused_rms_norm_backward.default": _layer_norm_backward_workspace,
    "aten.native_batch_norm_backward.default": _batch_norm_backward_workspace,
    "aten.batch_norm_backward.default": _batch_norm_backward_workspace,
    **{
        name: partial(_resized_loss_workspace, position=position, is_copied=is_copied)
        for name, (position, is_copied) in _RESIZED_LOSSES.items()
    },
    "aten.huber_loss.default": _huber_loss_workspace,
    "aten.binary_cross_entropy_with_logits.default": _bce_with_logits_workspace,
}
