"""Flash attention and memory-efficient attention, forward and backward.

Sources: `mha_fwd` and `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp;
`_efficient_attention_forward` and `_efficient_attention_backward` in attention.cu and
attention_backward.cu, with `workspace_size` of mem_eff_attention/kernel_backward.h and the kernels
of kernels/cutlassB.h (torch 2.11 to 2.15). cuDNN's attention has a workspace that only cuDNN knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from remat.costs.layouts import (
    HALF_DTYPES,
    dense_meta,
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
)
from remat.costs.workspaces.reductions import reduction_buffers
from remat.documents.records import TensorMeta

FLEX_TARGET = "remat.flex_attention.default"
FLEX_BACKWARD_TARGET = "remat.flex_attention_backward.default"
"""Operators that stand for `flex_attention` in traces for absent GPUs."""

_FLOAT_BYTES = 4


def _round_up_to(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def _token_major_copy_bytes(x: TensorMeta) -> int:
    """Return the bytes of the copy that makes a tensor (batch, heads, tokens, size) contiguous in
    the order (batch, tokens, heads, size), in which the kernels work; 0 if it is already."""
    return 0 if is_contiguous_in_order(x, (0, 2, 1, 3)) else tensor_bytes(x)


def _flash_forward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of flash attention: partial outputs if several thread blocks share the
    keys of one query; with dropout, a random state."""
    query, key = call.tensor(0), call.tensor(1)
    dropout_p = call.argument(3, 0.0)
    batch, heads, queries, head_size = query.shape
    keys, key_heads = key.shape[2], key.shape[1]
    if queries == 1 and heads > key_heads and not dropout_p:
        queries, heads = heads // key_heads, key_heads  # the heads of a group act as queries
    yield from call.result_bytes
    splits = 1
    if not dropout_p:
        block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
        splits = _key_splits(
            batch * heads * -(-queries // 64),
            2 * call.device.multiprocessors,
            -(-keys // block),
        )
    if splits > 1:
        rows = splits * batch * heads * queries
        rounded = _round_up_to(head_size, 32 if head_size <= 128 else 64)
        yield from buffers_during([_FLOAT_BYTES * rows, _FLOAT_BYTES * rows * rounded])
    elif dropout_p:
        yield from buffers_during([16])  # the first of two random states


def _key_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """Return the number of thread blocks among which flash attention divides the keys of one query:
    1 if its `blocks` fill the multiprocessors; else the smallest number with at least 85% of the
    best use of them."""
    if blocks >= 0.8 * multiprocessors:
        return 1
    most = min(128, multiprocessors, key_blocks)

    def is_eligible(splits: int) -> bool:
        return splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1))

    def efficiency(splits: int) -> float:
        waves = blocks * splits / multiprocessors
        return waves / ceil(waves)

    eligible = [splits for splits in range(1, most + 1) if is_eligible(splits)]
    best = max(map(efficiency, eligible), default=0.0)
    return next((s for s in eligible if efficiency(s) >= 0.85 * best), 1)


def _flash_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the backward of flash attention: row sums and the query's gradient
    in float32; if query heads share keys and values, the gradients of these for each query head and
    their sum; and copies of operands."""
    grad_out, query, key, out = (call.tensor(i) for i in (0, 1, 2, 4))
    batch, heads, queries, head_size = query.shape
    copies = [_token_major_copy_bytes(grad_out), _token_major_copy_bytes(out)]
    rows = batch * _round_up_to(queries, 128)
    key_shape = (batch, key.shape[2], key.shape[1])
    yield from _flash_backward_buffers(call, copies, (rows, heads, head_size), key, key_shape)


def _varlen_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the backward of flash attention for packed sequences, whose rows
    are padded by 128 for each sequence."""
    grad_out, query, key, out = (call.tensor(i) for i in (0, 1, 2, 4))
    tokens, heads, head_size = query.shape
    copies = [contiguous_copy_bytes(grad_out), contiguous_copy_bytes(out)]
    rows = tokens + 128 * (call.tensor(6).shape[0] - 1)
    key_shape = (1, key.shape[0], key.shape[1])
    yield from _flash_backward_buffers(call, copies, (rows, heads, head_size), key, key_shape)


def _flash_backward_buffers(
    call: OperatorCall,
    copies: list[int],
    padded_query: tuple[int, int, int],
    key: TensorMeta,
    key_shape: tuple[int, int, int],
) -> Allocations:
    """Yield the allocations of the backward for a query of padded (rows, heads, head size), and
    keys of (batch, keys, heads)."""
    rows, heads, head_size = padded_query
    batch, keys, key_heads = key_shape
    rounded_size = _round_up_to(head_size, 32 if head_size <= 128 else 64)
    row_bytes = _FLOAT_BYTES * heads * rows
    expanded = [2 * batch * keys * heads * head_size] * 2 if heads != key_heads else []

    def sums() -> Iterator[int]:
        grouped = dense_meta(key, (*key_shape, heads // key_heads, head_size))
        yield from reduction_buffers(call, grouped, (3,), _FLOAT_BYTES)

    inner = buffers_during(
        [row_bytes, row_bytes * rounded_size, *expanded], sums() if expanded else ()
    )
    yield from buffers_during(copies, (*call.result_bytes, *inner))


@dataclass(frozen=True, slots=True)
class _BackwardTile:
    """A kernel of memory-efficient attention's backward: the queries and keys of a tile, and the
    largest head size. `keeps_gradients` if the gradients of keys and values stay in registers."""

    queries: int
    keys: int
    max_head_size: int
    keeps_gradients: bool


_ANY_SIZE = 1 << 16


def _backward_tiles(dtype: str, capability: tuple[int, int]) -> list[_BackwardTile]:
    """Return the kernels of the backward for a dtype and a compute capability, in torch's order.
    The first one with a sufficient head size runs, if its shared memory fits."""
    is_half = dtype in HALF_DTYPES

    def tile(queries: int, keys: int, head_size: int) -> _BackwardTile:
        return _BackwardTile(queries, keys, head_size, is_half and head_size <= queries)

    small = [tile(64, 64, 32), tile(64, 64, 64)]
    large = [tile(64, 64, 128), tile(128, 64, _ANY_SIZE), tile(64, 64, _ANY_SIZE)]
    if capability < (7, 0) or (capability < (8, 0) and not is_half):
        return [*small, tile(64, 64, 128), tile(64, 64, _ANY_SIZE)]
    if capability in ((8, 6), (8, 9)) and is_half:
        small.append(tile(128, 64, 96))
    return [*small, tile(128, 128 if is_half and capability >= (8, 0) else 64, 128), *large]


_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Devices with at least 163 KiB of shared memory for a block: there, the first kernel fits."""


def _efficient_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the backward of memory-efficient attention: row sums, and the
    query's gradient in float32 tiles, with the gradients of keys and values where registers do not
    hold them."""
    grad_out, query, value = call.tensor(0), call.tensor(1), call.tensor(3)
    batch, heads, queries, _ = query.shape
    capability = call.device.capability or (0, 0)
    size = max(query.shape[3], value.shape[3])
    tiles = [
        tile for tile in _backward_tiles(query.dtype, capability) if tile.max_head_size >= size
    ]
    if capability in _LARGE_SHARED_MEMORY:
        tiles = tiles[:1]
    workspace = max(_tile_workspace_bytes(tile, call) for tile in tiles)
    row_bytes = _FLOAT_BYTES * batch * heads * queries

    def inner() -> Iterator[int]:
        yield from call.result_bytes
        if query.dtype in HALF_DTYPES and capability >= (8, 0):
            yield from buffers_during([row_bytes, workspace])
            return
        # Row sums of gradient times output, in separate operations.
        product = tensor_bytes(grad_out, "float32")
        converted = [] if query.dtype == "float32" else [product, product]
        yield from (*converted, product)
        is_copied = queries > 1 and heads > 1
        yield from ([row_bytes, row_bytes] if is_copied else [row_bytes])
        yield from ([-row_bytes] if is_copied else [])
        yield from (-product, *(-size for size in converted))
        yield from buffers_during([workspace])
        yield -row_bytes

    yield from buffers_during([_token_major_copy_bytes(grad_out)], inner())


def _tile_workspace_bytes(tile: _BackwardTile, call: OperatorCall) -> int:
    """Return the bytes that a kernel of the backward needs in global memory."""
    query, key, value = (call.tensor(i) for i in range(1, 4))
    batch, heads, queries, head_size = query.shape
    keys = key.shape[2]
    splits = -(-keys // tile.keys)
    if batch * heads >= 256 and keys <= 2 * tile.keys:
        splits = 1
    elements = 0
    if query.dtype in HALF_DTYPES and not tile.keeps_gradients:
        splits = max(1, min(splits, 200 // (batch * heads)))
        for size in (head_size, value.shape[3]):
            elements += splits * tile.keys * _round_up_to(size, tile.queries)
    # A tile of the query's gradient, with a lock, a counter and padding.
    tile_count = -(-queries // tile.queries) * -(-head_size // tile.keys)
    elements += tile_count * (4 + tile.queries * tile.keys)
    return batch * heads * _round_up_to(elements, 4) * _FLOAT_BYTES


def _efficient_forward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of memory-efficient attention: the output in float32, if it is computed
    in half precision and a head is too large for registers."""
    query, value = call.tensor(0), call.tensor(2)
    yield from call.result_bytes
    if query.dtype in HALF_DTYPES and max(query.shape[3], value.shape[3]) > 128:
        batch, heads, queries, _ = query.shape
        yield from buffers_during([_FLOAT_BYTES * batch * queries * heads * value.shape[3]])


def _bias_gradient_storage(call: OperatorCall) -> tuple[int, ...]:
    """Return the bytes of the storages of the backward's results: of the bias's gradient, whose
    rows are padded to 16 elements. () if it is not computed."""
    bias, mask = call.optional_tensor(4), call.argument(10)
    if bias is None or not isinstance(mask, tuple) or not mask[3]:
        return ()
    rows = prod(call.tensor(1).shape[:3])
    return (0, 0, 0, rows * _round_up_to(bias.shape[-1], 16) * item_bytes(bias.dtype))


def _varlen_forward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of flash attention for packed sequences: another random state."""
    yield from (*call.result_bytes, *buffers_during([16]))


def _flex_forward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of flex attention: the maxima of the scores, which nothing reads."""
    yield from (
        *call.result_bytes,
        *buffers_during([_FLOAT_BYTES * prod(call.tensor(0).shape[:3])]),
    )


def _flex_backward_workspace(call: OperatorCall) -> Allocations:
    """Yield the allocations of the backward of flex attention: row sums of gradient times output,
    and a copy of a gradient in another layout than the output's."""
    grad_out, out = call.tensor(0), call.tensor(4)
    copy = 0 if grad_out.stride == out.stride else tensor_bytes(grad_out)
    rows = _FLOAT_BYTES * prod(out.shape[:3])
    yield from buffers_during([copy, rows], call.result_bytes)


STORAGES: dict[str, StorageFormula] = {
    "aten._scaled_dot_product_efficient_attention_backward.default": _bias_gradient_storage
}

FORMULAS: dict[str, Formula] = {
    "aten._scaled_dot_product_flash_attention.default": _flash_forward_workspace,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward_workspace,
    "torch_attn._varlen_attn.default": _varlen_forward_workspace,
    "torch_attn._varlen_attn_backward.default": _varlen_backward_workspace,
    FLEX_TARGET: _flex_forward_workspace,
    FLEX_BACKWARD_TARGET: _flex_backward_workspace,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_forward_workspace,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward_workspace,
}
