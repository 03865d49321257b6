"""Split rules of operators on images: convolutions, pooling, resampling, padding, indexing.

Most rules accept only the batch dimension as rows. Convolutions of 1 x 1 pixels also accept spatial
dimensions. Constant padding, pixel shuffle and indexing accept all dimensions that they leave
unchanged, if these come first.
"""

from __future__ import annotations

from remat.documents.arguments import Args, Ref
from remat.passes.split.part_rules import Rule, row_rule, split_with_shape
from remat.passes.split.states import (
    SUM,
    CallToSplit,
    PieceRange,
    Rows,
    SplitCall,
)


def _by_samples(rule: Rule) -> Rule:
    """Return `rule` for rows that are the first dimension; None for others."""

    def by_samples(call: CallToSplit) -> SplitCall | None:
        split = [state for state in call.states.values() if isinstance(state, Rows)]
        is_first = all((rows.first, rows.count) == (0, 1) for rows in split)
        return rule(call) if is_first else None

    return by_samples


def _convolution_rule(gradients: int, weight: int) -> Rule:
    """Return the rule of a convolution (`gradients` = 0), or of its backward, whose first argument
    is the gradient of the output (`gradients` = 1). `weight` is the index of the kernel; bias,
    stride and padding follow."""
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
    """True for a convolution of 1 x 1 pixels with stride 1 and no padding, also of the output."""
    stride, padding = call.argument(weight + 2), call.argument(weight + 3)
    output_padding = call.argument(weight + 6)
    return (
        all(size == 1 for size in call.shape(weight)[2:])
        and all(step == 1 for step in stride)
        and not any((*padding, *output_padding))
    )


def _rule_with_count(index: int, *arguments: int, summed: bool = False) -> Rule:
    """Return the rule of an operator that has the batch size as the argument `index`. `arguments`
    are the indices of the split tensors; if `summed`, results after the first are sums."""
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
    """Return the rule of a backward that has the input's shape as the argument `index`."""

    def rule(call: CallToSplit) -> SplitCall | None:
        return split_with_shape(call, call.common_rows(), index)

    return _by_samples(rule)


def _split_shuffle(call: CallToSplit) -> SplitCall | None:
    """Split an operator that rearranges the last three dimensions by rows before them."""
    rows = call.common_rows(0)
    is_outside = rows is not None and rows.dimensions.stop <= len(call.shape(0)) - 3
    return call.results_in(rows) if rows is not None and is_outside else None


def _split_indexing(call: CallToSplit) -> SplitCall | None:
    """Split `index` or `index_put` by rows before the indexed dimensions. These have to be
    adjacent: otherwise the result has them first."""
    is_write = len(call.node.args) > 2
    rows = call.common_rows(0, 2) if is_write else call.common_rows(0)
    indices = [index.name if isinstance(index, Ref) else "" for index in call.argument(1)]
    indexed = [number for number, name in enumerate(indices) if name]
    if rows is None or not indexed or rows.dimensions.stop > indexed[0]:
        return None
    metas = [call.metas[indices[number]] for number in indexed]
    if indexed[-1] - indexed[0] + 1 != len(indexed) or any(m.dtype == "bool" for m in metas):
        return None
    places = len(call.shape(0)) - len(indexed) + max(len(meta.shape) for meta in metas)
    if is_write and len(call.shape(2)) != places:  # the values are broadcast to other dimensions
        return None
    return call.results_in(rows)


def _split_padding(call: CallToSplit) -> SplitCall | None:
    """Split constant padding by rows before the padded dimensions: the argument has two numbers for
    each of the last ones."""
    rows, padded = call.common_rows(0), len(call.argument(1)) // 2
    is_outside = rows is not None and rows.dimensions.stop <= len(call.shape(0)) - padded
    return call.results_in(rows) if rows is not None and is_outside else None


_BY_SAMPLES = """
    avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d
    avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward adaptive_max_pool2d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward
    replication_pad2d_backward grid_sampler_2d
"""

"""Pooling, other padding and grid sampling, with their backwards."""

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
    "constant_pad_nd.default": _split_padding,
    "index.Tensor": _split_indexing,
    "_unsafe_index.Tensor": _split_indexing,
    "index_put.default": _split_indexing,
    "_unsafe_index_put.default": _split_indexing,
    **{f"{name}.default": _by_samples(row_rule()) for name in _BY_SAMPLES.split()},
    **{
        f"{name}.{kind}": _by_samples(row_rule(0))
        for name in _RESAMPLING.split()
        for kind in ("default", "vec")
    },
    **{f"{name}_backward.default": _rule_with_shape(2) for name in _RESAMPLING.split()},
}
"""The rule of each operator, by its name in `aten`."""
