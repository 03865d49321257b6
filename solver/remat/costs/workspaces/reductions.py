"""Operators that run torch's reduction kernel (sums, means, extrema, norms, variances), and the
kernel's iteration space, launch and global buffers.

If a reduction has few results, several thread blocks reduce each of them. Their partial results go
through a staging buffer in global memory, next to one semaphore per column of blocks. The staging
buffer is large: without a reduction across the threads of a block's x dimension, torch allocates it
`block.x * vector size` times larger than the partial results.

The rules follow `setReduceConfig` and `gpu_reduce_kernel` in
aten/src/ATen/native/cuda/Reduce.cuh, and `TensorIterator` (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from remat.costs.layouts import (
    HALF_DTYPES,
    contiguous_meta,
    converted_meta,
    item_bytes,
    tensor_bytes,
)
from remat.costs.workspaces.call import (
    Allocations,
    Formula,
    OperatorCall,
    buffers_during,
    contiguous_copy_bytes,
)
from remat.documents.records import TensorMeta

_WARP_THREADS = 32
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_MAX_INT32 = 2**31 - 1
_VECTOR_ELEMENTS = 4
"""Elements that one load reads, along the output or along the input."""


@dataclass(frozen=True, slots=True)
class ReduceIteration:
    """The dimensions of a reduction, the fastest first, with the strides of input and output in
    bytes. Reduced dimensions come first and have an output stride of 0."""

    shape: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_strides: tuple[int, ...]
    offset_bytes: int
    """The offset of the first input element from an aligned address."""

    @property
    def reduced_dims(self) -> int:
        """The number of reduced dimensions."""
        return self.output_strides.count(0)

    @property
    def output_count(self) -> int:
        """The number of results."""
        pairs = zip(self.shape, self.output_strides, strict=True)
        return prod(size for size, stride in pairs if stride)

    @property
    def fits_32_bit(self) -> bool:
        """True if 32 bits suffice for the offset of each element, in bytes."""
        all_strides = (self.input_strides, self.output_strides)
        return prod(self.shape) <= _MAX_INT32 and all(
            sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True)) < _MAX_INT32
            for strides in all_strides
        )

    def parts(self) -> Iterator[ReduceIteration]:
        """Yield the parts of the iteration space that torch reduces one after the other: itself if
        it fits into 32-bit offsets, else parts that do."""
        if self.fits_32_bit:
            yield self
            return
        extents = [
            (n - 1) * max(i, o)
            for n, i, o in zip(self.shape, self.input_strides, self.output_strides, strict=True)
        ]
        # The slowest of the dimensions with the largest extent.
        dim = max(range(len(extents)), key=lambda d: (extents[d], d))
        first = self.shape[dim] // 2
        for start, size in ((0, first), (first, self.shape[dim] - first)):
            yield from replace(
                self,
                shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]),
                offset_bytes=self.offset_bytes + start * self.input_strides[dim],
            ).parts()


def reduce_iteration(
    tensor: TensorMeta, dims: Sequence[int], result_dtype: str, keepdim: bool
) -> ReduceIteration:
    """Return the iteration space of a reduction over `dims`, all of them if there are none."""
    rank = len(tensor.shape)
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    input_bytes, step = item_bytes(tensor.dtype), item_bytes(result_dtype)
    output_strides = [0] * rank
    for dim in reversed(range(rank)):
        if dim not in reduced or (keepdim and tensor.shape[dim] == 1):
            output_strides[dim] = step
        if dim not in reduced:
            step *= tensor.shape[dim]
    strides = [stride * input_bytes for stride in tensor.stride]
    order = _iteration_order(tensor.shape, output_strides, strides)
    shape, (output_strides, strides) = _coalesced_dimensions(
        [tensor.shape[d] for d in order],
        [[output_strides[d] for d in order], [strides[d] for d in order]],
    )
    return ReduceIteration(
        tuple(shape), tuple(strides), tuple(output_strides), tensor.offset * input_bytes
    )


def _iteration_order(
    shape: Sequence[int], output_strides: Sequence[int], input_strides: Sequence[int]
) -> list[int]:
    """Return the dimensions in the order in which `TensorIterator` iterates, the fastest first: an
    insertion sort by strides, with reduced dimensions in front."""

    def comparison(first: int, second: int) -> int:
        """Return 1 if `first` comes after `second`, -1 if before, 0 if that is undecided."""
        for is_output, strides in ((True, output_strides), (False, input_strides)):
            a, b = strides[first], strides[second]
            if is_output and (a == 0) != (b == 0):
                return 1 if b == 0 else -1
            if a == 0 or b == 0:
                continue
            if a != b:
                return 1 if a > b else -1
            if shape[first] > shape[second]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        moved = i
        for j in range(i - 1, -1, -1):
            result = comparison(order[j], order[moved])
            if result > 0:
                order[j], order[moved] = order[moved], order[j]
                moved = j
            elif result < 0:
                break
    return order


def _coalesced_dimensions(
    shape: Sequence[int], operand_strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Return the sizes of the dimensions and the strides of each operand, with neighbouring
    dimensions joined where the strides of all operands allow it."""
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in operand_strides]
    for dim, size in enumerate(shape):
        is_joined = bool(sizes) and (
            1 in (sizes[-1], size)
            or all(
                sizes[-1] * joined[-1] == original[dim]
                for joined, original in zip(strides, operand_strides, strict=True)
            )
        )
        if is_joined:
            if sizes[-1] == 1:
                for joined, original in zip(strides, operand_strides, strict=True):
                    joined[-1] = original[dim]
            sizes[-1] *= size
        else:
            sizes.append(size)
            for joined, original in zip(strides, operand_strides, strict=True):
                joined.append(original[dim])
    return sizes, strides


@dataclass(frozen=True, slots=True)
class ReduceKernel:
    """The types that a reduction is compiled for."""

    input_bytes: int
    accumulator_bytes: int
    result_bytes: int
    input_vector: int = _VECTOR_ELEMENTS
    """Input elements that one load reads, where the fastest dimension is reduced."""
    max_threads: int = 512


def reduce_launch_buffers(
    iteration: ReduceIteration, kernel: ReduceKernel, multiprocessors: int, threads: int
) -> list[int]:
    """Return the bytes of the buffers that one part of a reduction allocates: the staging buffer
    and the semaphores, or none. `threads` is the number of threads of a multiprocessor."""
    launch = _ReduceLaunch(iteration, kernel)
    blocks = launch.blocks_per_output(multiprocessors, threads)
    if blocks <= 1:
        return []
    staging_bytes = kernel.accumulator_bytes * iteration.output_count * blocks
    if not launch.is_fastest_reduced:
        staging_bytes *= launch.block_width * launch.output_vector
    return [staging_bytes, 4 * launch.grid]


class _ReduceLaunch:
    """The block and the grid with which torch launches a reduction."""

    def __init__(self, iteration: ReduceIteration, kernel: ReduceKernel) -> None:
        reduced_dims = iteration.reduced_dims
        outputs = iteration.output_count
        self.inputs = prod(iteration.shape) // outputs
        strides = iteration.input_strides
        self.is_fastest_reduced = True
        x, y, fastest_stride = 1, 1, kernel.input_bytes
        if iteration.shape:
            self.is_fastest_reduced = (
                reduced_dims == len(iteration.shape) or strides[0] < strides[reduced_dims]
            )
            x, y = (self.inputs, outputs) if self.is_fastest_reduced else (outputs, self.inputs)
            fastest_stride = strides[0 if self.is_fastest_reduced else reduced_dims]
        self.output_vector = 1
        if fastest_stride == kernel.input_bytes:
            if self.is_fastest_reduced and x >= 128 and reduced_dims == 1:
                x //= kernel.input_vector
            elif not self.is_fastest_reduced:
                self.output_vector = _output_vector_size(iteration, kernel.input_bytes)
                x //= self.output_vector
        max_threads = kernel.max_threads // self.output_vector
        self.block_width = min(_largest_power_of_2(x, max_threads), _WARP_THREADS)
        self.block_height = min(
            _largest_power_of_2(y, max_threads), max_threads // self.block_width
        )
        self.block_width = min(
            _largest_power_of_2(x, max_threads), max_threads // self.block_height
        )
        step_input = self.block_width if self.is_fastest_reduced else 1
        step_output = 1 if self.is_fastest_reduced else self.block_width
        threshold = min(self.block_height * 16, _MAX_VALUES_PER_THREAD)
        self.is_split_across_warps = -(-self.inputs // step_input) >= threshold
        if self.is_split_across_warps:
            step_input *= self.block_height
        else:
            step_output *= self.block_height
        self.values_per_thread = -(-self.inputs // step_input)
        self.grid = -(-(outputs // self.output_vector) // step_output)

    def blocks_per_output(self, multiprocessors: int, threads: int) -> int:
        """Return the number of thread blocks that reduce one result together."""
        target_grid = multiprocessors * (threads // (self.block_width * self.block_height))
        if (
            not self.is_split_across_warps
            or self.values_per_thread < _MAX_VALUES_PER_THREAD
            or self.grid > target_grid
        ):
            return 1
        by_grid = -(-target_grid // self.grid)
        most = -(-self.values_per_thread // _MIN_VALUES_PER_THREAD)
        least = -(-self.values_per_thread // _MAX_VALUES_PER_THREAD)
        return min(max(by_grid, least), most)


def _largest_power_of_2(count: int, limit: int) -> int:
    """Return the largest power of 2 that is at most `count`; `limit` if `count` reaches it."""
    return limit if count >= limit else max(1, 1 << (max(count, 1).bit_length() - 1))


def _output_vector_size(iteration: ReduceIteration, input_bytes: int) -> int:
    """Return the number of neighbouring results of one thread: 4, 2 or 1, as alignment allows."""
    fastest = iteration.reduced_dims
    others = (s for dim, s in enumerate(iteration.input_strides) if dim != fastest)
    divided = (
        iteration.offset_bytes // input_bytes,
        iteration.shape[fastest],
        *(stride // input_bytes for stride in others),
    )
    vector = _VECTOR_ELEMENTS
    while any(number % vector for number in divided):
        vector //= 2
    return vector


_INDEX_BYTES = 8


def accumulator_bytes(dtype: str) -> int:
    """Return the bytes of one element of the type in which torch adds elements of `dtype`."""
    return 4 if dtype in HALF_DTYPES else item_bytes(dtype)


def _value_and_index_bytes(_: str) -> int:
    """Return the bytes of an element with its index, as extrema with positions compare them."""
    return 2 * _INDEX_BYTES


def _welford_bytes(dtype: str) -> int:
    """Return the bytes of Welford's running mean and variance: mean, sum of squares, two counts."""
    return 4 * accumulator_bytes(dtype)


def _mask_bytes(_: str) -> int:
    """Return the bytes of an element of a boolean mask, whatever the dtype of the input is."""
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
            yield from buffers_during(
                reduce_launch_buffers(
                    part, kernel, call.device.multiprocessors, call.device.multiprocessor_threads
                ),
                (),
            )

    yield from buffers_during(
        [accumulator * iteration.output_count] if has_own_sum else (), parts()
    )


def argument_dimensions(argument: object) -> tuple[int, ...]:
    """Return the dimensions that an argument lists: one for an integer, () for None, which means
    all."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return (argument,)
    if isinstance(argument, (list, tuple)):
        return tuple(item for item in argument if isinstance(item, int))
    return ()


def _reduction_workspace(
    call: OperatorCall,
    accumulator: Callable[[str], int],
    dims_position: int = 1,
    keepdim_position: int = 2,
    is_cast: bool = False,
    is_flattened: bool = False,
) -> Allocations:
    """Yield the allocations of a reduction. `accumulator` returns the bytes of a partial result for
    a dtype; dimensions and `keepdim` are the arguments at these positions. `is_cast` if it first
    converts its input to the dtype of its result, `is_flattened` if it first makes an input
    contiguous of which it reduces all elements."""
    x = call.tensor(0)
    dtype = call.results[0].tensor.dtype
    is_converted = is_cast and x.dtype != dtype
    if is_converted and x.dtype in HALF_DTYPES and dtype == "float32":
        is_converted = False  # the kernel converts while it reads
    copies: list[int] = []
    if is_converted:
        copies = [tensor_bytes(x, dtype)]
        x = converted_meta(x, dtype)
    if is_flattened and not argument_dimensions(call.argument(dims_position)):
        copies.append(contiguous_copy_bytes(x))
        x = contiguous_meta(x)
    yield from call.result_bytes
    yield from buffers_during(
        copies,
        reduction_buffers(
            call,
            x,
            argument_dimensions(call.argument(dims_position)),
            accumulator(x.dtype),
            keepdim=call.argument(keepdim_position) is True,
            result_dtype=dtype,
        ),
    )


def _count_nonzero_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of counting non-zero elements: a boolean mask, and its conversion to
    integers, which are summed."""
    x = call.tensor(0)
    counted = converted_meta(x, "int64")
    yield tensor_bytes(x, "bool")
    yield from call.result_bytes
    yield from buffers_during(
        [tensor_bytes(counted)],
        reduction_buffers(call, counted, argument_dimensions(call.argument(1)), _INDEX_BYTES),
    )
    yield -tensor_bytes(x, "bool")


def _logsumexp_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of log-sum-exp: the maximum, the difference to it, which is as large as
    the input, and the sum of its exponentials."""
    x, dims = call.tensor(0), argument_dimensions(call.argument(1))
    result = sum(call.result_bytes)
    outputs = prod(call.results[0].tensor.shape)
    yield result  # the maximum
    yield from reduction_buffers(call, x, dims, item_bytes(x.dtype), keepdim=True)
    yield from buffers_during([result, outputs], ())  # where the maximum is infinite
    yield tensor_bytes(x)
    yield result
    yield from reduction_buffers(call, x, dims, accumulator_bytes(x.dtype))
    yield from (-tensor_bytes(x), -result)


def _norm_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of a norm, whose arguments are (self, order, dimensions, keepdim)."""
    return _reduction_workspace(call, accumulator_bytes, 2, 3, is_cast=True)


_sum = partial(_reduction_workspace, accumulator=accumulator_bytes, is_cast=True)
_sum_of_all = partial(
    _reduction_workspace, accumulator=accumulator_bytes, dims_position=9, is_cast=True
)
_extremum = partial(_reduction_workspace, accumulator=item_bytes)
_extremum_of_all = partial(
    _reduction_workspace, accumulator=item_bytes, dims_position=9, is_flattened=True
)
_position = partial(_reduction_workspace, accumulator=_value_and_index_bytes, is_flattened=True)
_variance = partial(_reduction_workspace, accumulator=_welford_bytes, keepdim_position=9)
_truth = partial(_reduction_workspace, accumulator=_mask_bytes)
_truth_of_all = partial(_reduction_workspace, accumulator=_mask_bytes, dims_position=9)

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
        _norm_workspace,
    ),
    "aten.count_nonzero.dim_IntList": _count_nonzero_workspace,
    "aten.logsumexp.default": _logsumexp_workspace,
}
