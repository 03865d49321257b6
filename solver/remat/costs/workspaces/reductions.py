"""Operators that run torch's reduction kernel: sums, means, extrema, norms, variances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

from remat.costs.roofline import item_bytes
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    contiguous_copy_bytes,
    during,
    is_contiguous,
    tensor_bytes,
)
from remat.costs.workspaces.reduce_kernel import ReduceKernel, reduce_buffers, reduce_iteration
from remat.documents.records import TensorMeta

HALF_DTYPES = ("float16", "bfloat16")
_INDEX_BYTES = 8


def accumulator_bytes(dtype: str) -> int:
    """Return the bytes of the type in which torch adds elements of `dtype`."""
    return 4 if dtype in HALF_DTYPES else item_bytes(dtype)


def _pair_bytes(_: str) -> int:
    """Return the bytes of an element with its index, as extrema with positions compare them."""
    return 2 * _INDEX_BYTES


def _welford_bytes(dtype: str) -> int:
    """Return the bytes of Welford's running mean and variance: mean, sum of squares, two counts."""
    return 4 * accumulator_bytes(dtype)


def _mask_bytes(_: str) -> int:
    return 1


def reduction_buffers(
    call: OperatorCall,
    x: TensorMeta,
    dims: Sequence[int],
    accumulator: int,
    *,
    keepdim: bool = False,
    result_dtype: str | None = None,
) -> Allocations:
    """Yield the buffers of a reduction of `x` over `dims` (all without any), not its result.
    `accumulator` is the number of bytes of a partial result."""
    if 0 in x.shape:
        return
    kernel = ReduceKernel(item_bytes(x.dtype), accumulator, item_bytes(result_dtype or x.dtype))
    iteration = reduce_iteration(x, dims, result_dtype or x.dtype, keepdim)
    # The parts of a large reduction are added outside of a result in half precision.
    is_half = x.dtype in HALF_DTYPES and (result_dtype or x.dtype) == x.dtype
    has_own_sum = is_half and accumulator > item_bytes(x.dtype) and not iteration.fits_32_bit

    def parts() -> Iterator[int]:
        for part in iteration.parts():
            yield from during(
                reduce_buffers(
                    part, kernel, call.device.multiprocessors, call.device.multiprocessor_threads
                ),
                (),
            )

    yield from during([accumulator * iteration.output_count] if has_own_sum else (), parts())


def dimensions(argument: object) -> tuple[int, ...]:
    """Return the dimensions of an argument: an integer, a list, or none for all."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return (argument,)
    if isinstance(argument, (list, tuple)):
        return tuple(item for item in argument if isinstance(item, int))
    return ()


def _reduction(
    call: OperatorCall,
    accumulator: Callable[[str], int],
    dims_position: int = 1,
    keepdim_position: int = 2,
    is_cast: bool = False,
    is_flattened: bool = False,
) -> Allocations:
    """Yield the allocations of a reduction. `is_cast` if it first converts its input to the dtype
    of its result, `is_flattened` if it first makes it contiguous, to reduce all elements."""
    x = call.tensor(0)
    dtype = call.results[0].tensor.dtype
    is_converted = is_cast and x.dtype != dtype
    if is_converted and x.dtype in HALF_DTYPES and dtype == "float32":
        is_converted = False  # the kernel converts while it reads
    copies: list[int] = []
    if is_converted:
        copies = [tensor_bytes(x, dtype)]
        x = with_dtype(x, dtype)
    if is_flattened and not dimensions(call.argument(dims_position)):
        copies.append(contiguous_copy_bytes(x))
        x = contiguous(x)
    yield from call.result_bytes
    yield from during(
        copies,
        reduction_buffers(
            call,
            x,
            dimensions(call.argument(dims_position)),
            accumulator(x.dtype),
            keepdim=call.argument(keepdim_position) is True,
            result_dtype=dtype,
        ),
    )


def with_dtype(meta: TensorMeta, dtype: str) -> TensorMeta:
    """Return the metadata of a tensor that is converted to a dtype, with a dense layout."""
    order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim))
    strides, step = [0] * len(meta.shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(meta.shape[dim], 1)
    return TensorMeta(
        dtype=dtype, shape=meta.shape, stride=tuple(strides), offset=0, device=meta.device
    )


def contiguous(meta: TensorMeta) -> TensorMeta:
    """Return the metadata of a tensor after `contiguous()`."""
    if is_contiguous(meta):
        return meta
    strides, step = [0] * len(meta.shape), 1
    for dim in reversed(range(len(meta.shape))):
        strides[dim] = step
        step *= max(meta.shape[dim], 1)
    return TensorMeta(dtype=meta.dtype, shape=meta.shape, stride=tuple(strides), device=meta.device)


def _count_nonzero(call: OperatorCall) -> Allocations:
    """Count the non-zero elements: a sum of a boolean mask, converted to integers."""
    x = call.tensor(0)
    counted = with_dtype(x, "int64")
    yield tensor_bytes(x, "bool")
    yield from call.result_bytes
    yield from during(
        [tensor_bytes(counted)],
        reduction_buffers(call, counted, dimensions(call.argument(1)), _INDEX_BYTES),
    )
    yield -tensor_bytes(x, "bool")


def _logsumexp(call: OperatorCall) -> Allocations:
    """Subtract the maximum, then sum the exponentials: a difference as large as the input."""
    x, dims = call.tensor(0), dimensions(call.argument(1))
    result = sum(call.result_bytes)
    outputs = prod(call.results[0].tensor.shape)
    yield result  # the maximum
    yield from reduction_buffers(call, x, dims, item_bytes(x.dtype), keepdim=True)
    yield from during([result, outputs], ())  # where the maximum is infinite
    yield tensor_bytes(x)
    yield result
    yield from reduction_buffers(call, x, dims, accumulator_bytes(x.dtype))
    yield from (-tensor_bytes(x), -result)


def _norm(call: OperatorCall) -> Allocations:
    """The norm of a tensor: (self, order, dimensions, keepdim)."""
    return _reduction(call, accumulator_bytes, 2, 3, is_cast=True)


_sum = partial(_reduction, accumulator=accumulator_bytes, is_cast=True)
_sum_of_all = partial(_reduction, accumulator=accumulator_bytes, dims_position=9, is_cast=True)
_extremum = partial(_reduction, accumulator=item_bytes)
_extremum_of_all = partial(_reduction, accumulator=item_bytes, dims_position=9, is_flattened=True)
_position = partial(_reduction, accumulator=_pair_bytes, is_flattened=True)
_variance = partial(_reduction, accumulator=_welford_bytes, keepdim_position=9)
_truth = partial(_reduction, accumulator=_mask_bytes)
_truth_of_all = partial(_reduction, accumulator=_mask_bytes, dims_position=9)

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("aten.sum.dim_IntList", "aten.nansum.default", "aten.mean.dim"), _sum),
    **dict.fromkeys(("aten.sum.default", "aten.mean.default", "aten.prod.default"), _sum_of_all),
    "aten.prod.dim_int": _sum,
    **dict.fromkeys(("aten.amax.default", "aten.amin.default"), _extremum),
    **dict.fromkeys(("aten.max.default", "aten.min.default"), _extremum_of_all),
    **dict.fromkeys(
        ("aten.argmax.default", "aten.argmin.default", "aten.max.dim", "aten.min.dim"), _position
    ),
    **dict.fromkeys(
        (
            "aten.var.correction",
            "aten.std.correction",
            "aten.var_mean.correction",
            "aten.std_mean.correction",
        ),
        _variance,
    ),
    **dict.fromkeys(("aten.any.dim", "aten.any.dims", "aten.all.dim", "aten.all.dims"), _truth),
    **dict.fromkeys(("aten.any.default", "aten.all.default"), _truth_of_all),
    **dict.fromkeys(
        (
            "aten.linalg_vector_norm.default",
            "aten.norm.ScalarOpt_dim",
            "aten.norm.ScalarOpt_dim_dtype",
            "aten.norm.Scalar",
            "aten.norm.ScalarOpt_dtype",
        ),
        _norm,
    ),
    "aten.count_nonzero.dim_IntList": _count_nonzero,
    "aten.logsumexp.default": _logsumexp,
}
