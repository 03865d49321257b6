"""Rules of the operators on images and other signals: convolutions, pooling, resampling, padding.

Their rows are samples, the first dimension. Where a convolution has a kernel of one pixel, as at
the end of many segmentation models, rows may be pixels, too.
"""

from __future__ import annotations

from remat.documents.arguments import Args
from remat.passes.split.part_rules import Rule, row_rule, split_with_shape
from remat.passes.split.states import (
    SUM,
    CallToSplit,
    PieceRange,
    Rows,
    SplitCall,
)


def _by_samples(rule: Rule) -> Rule:
    """Return the rule for rows that are the first dimension only."""

    def by_samples(call: CallToSplit) -> SplitCall | None:
        split = [state for state in call.states.values() if isinstance(state, Rows)]
        is_first = all((rows.first, rows.count) == (0, 1) for rows in split)
        return rule(call) if is_first else None

    return by_samples


def _convolution_rule(gradients: int, weight: int) -> Rule:
    """Return the rule of a convolution, or of its backward with `gradients` of them before the
    input. The argument `weight` is the kernel; the stride is the argument after the bias."""
    by_rows = tuple(range(gradients + 1))

    def rule(call: CallToSplit) -> SplitCall | None:
        rows = call.common_rows(*by_rows)
        if rows is None or 1 in rows.dimensions:  # channels
            return None
        if rows.first and not _is_pixelwise(call, weight):
            return None
        return SplitCall(
            tuple(SUM if gradients and r.position else rows for r in call.node.results)
        )

    return rule


def _is_pixelwise(call: CallToSplit, weight: int) -> bool:
    """True for a convolution with a kernel, a stride and a dilation of 1, and without padding."""
    stride, padding = call.argument(weight + 2), call.argument(weight + 3)
    return (
        all(size == 1 for size in call.shape(weight)[2:])
        and all(step == 1 for step in stride)
        and not any(padding)
    )


def _rule_with_count(index: int, *arguments: int, summed: bool = False) -> Rule:
    """Return the rule of an operator that receives the number of samples as the argument `index`,
    and works on the same samples of the `arguments`."""
    rule = row_rule(*arguments, summed=summed)

    def with_count(call: CallToSplit) -> SplitCall | None:
        split, rows = rule(call), call.state(arguments[0])
        if split is None or not isinstance(rows, Rows):
            return None

        def for_piece(piece: PieceRange) -> Args:
            return call.args_with(index, rows.in_piece(piece).rows * rows.block)

        return SplitCall(split.results, for_piece)

    return _by_samples(with_count)


def _rule_with_shape(index: int) -> Rule:
    """Return the rule of the backward of an operator, with the input's shape at `index`."""

    def rule(call: CallToSplit) -> SplitCall | None:
        return split_with_shape(call, call.common_rows(), index)

    return _by_samples(rule)


def _split_shuffle(call: CallToSplit) -> SplitCall | None:
    """Exchange channels and pixels: the last three dimensions."""
    rows = call.common_rows(0)
    is_outside = rows is not None and rows.dimensions.stop <= len(call.shape(0)) - 3
    return call.results_in(rows) if rows is not None and is_outside else None


def _split_indexing(call: CallToSplit) -> SplitCall | None:
    """Index dimensions after the rows, or write into such places: the indices are whole. Indices of
    dimensions that are not neighbours would move the rows."""
    by_rows = (0, 2) if len(call.node.args) > 2 else (0,)
    rows, indices = call.common_rows(*by_rows), call.argument(1)
    indexed = [number for number, index in enumerate(indices) if index is not None]
    are_neighbours = indexed == list(range(indexed[0], indexed[-1] + 1)) if indexed else False
    if rows is None or not are_neighbours or rows.dimensions.stop > indexed[0]:
        return None
    return call.results_in(rows)


def _split_padding(call: CallToSplit) -> SplitCall | None:
    """Pad dimensions after the rows: the argument has two numbers for each of the last ones."""
    rows, padded = call.common_rows(0), len(call.argument(1)) // 2
    is_outside = rows is not None and rows.dimensions.stop <= len(call.shape(0)) - padded
    return call.results_in(rows) if rows is not None and is_outside else None


_POOLING = """
    avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d
    avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward adaptive_max_pool2d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward
    replication_pad2d_backward grid_sampler_2d
"""

_RESAMPLING = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d upsample_linear1d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""

IMAGE_RULES: dict[str, Rule] = {
    "convolution.default": _convolution_rule(0, 1),
    "convolution_backward.default": _convolution_rule(1, 2),
    "native_group_norm.default": _rule_with_count(3, 0),
    "native_group_norm_backward.default": _rule_with_count(5, 0, 1, 2, 3, summed=True),
    "pixel_shuffle.default": _split_shuffle,
    "pixel_unshuffle.default": _split_shuffle,
    "im2col.default": _split_shuffle,
    "constant_pad_nd.default": _split_padding,
    "index.Tensor": _split_indexing,
    "_unsafe_index.Tensor": _split_indexing,
    "index_put.default": _split_indexing,
    "_unsafe_index_put.default": _split_indexing,
    **{f"{name}.default": _by_samples(row_rule()) for name in _POOLING.split()},
    **{
        f"{name}.{kind}": _by_samples(row_rule(0))
        for name in _RESAMPLING.split()
        for kind in ("default", "vec")
    },
    **{f"{name}_backward.default": _rule_with_shape(2) for name in _RESAMPLING.split()},
}
"""The rule of each operator, by its name in `aten`."""
