"""Rules of the operators that can be split: `RULES` has a line for each.

A rule gives the states of an operation's results from the states of its arguments; None if it
cannot be split so. An operator without a rule ends a region.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from remat.passes.split.image_rules import IMAGE_RULES
from remat.passes.split.part_rules import (
    JOINS,
    SELECT_SCATTER,
    SLICE_BACKWARD,
    SLICE_SCATTER,
    Rule,
    join_rule,
    row_rule,
    split_chunks,
    split_select,
    split_select_scatter,
    split_slice,
    split_slice_backward,
    split_slice_scatter,
    split_unbind,
    split_with_shape,
)
from remat.passes.split.states import (
    SUM,
    WHOLE,
    CallToSplit,
    OfRow,
    PartialSum,
    Rows,
    SplitCall,
    Whole,
    candidate_rows,
)

_MEAN, _SUM = 1, 2
"""Values of the argument `reduction` of torch's losses."""


def split_call(call: CallToSplit) -> SplitCall | None:
    """Return what a call in these states gives; None if it cannot be split so, or if nothing of it
    is split."""
    if call.node.random:
        return None
    if call.node.target not in (*JOINS, SELECT_SCATTER) and (of_row := _of_one_row(call)):
        return of_row
    rule = RULES.get(call.node.target)
    is_split = any(isinstance(call.states.get(name), Rows | OfRow) for name in call.tensors)
    if rule is None or not (is_split or rule is _split_fill):
        return None
    result = rule(call)
    return None if result is None or _may_overflow(call, result) else result


def _of_one_row(call: CallToSplit) -> SplitCall | None:
    """Any operation on tensors of one row, and on others that are whole, is of that row. None if it
    reads none, or several."""
    states = {call.states.get(name, WHOLE) for name in call.tensors} - {WHOLE}
    (state,) = states if len(states) == 1 else (WHOLE,)
    return call.results_in(state) if isinstance(state, OfRow) else None


def _may_overflow(call: CallToSplit, result: SplitCall) -> bool:
    """True if a mean becomes a sum in float16: torch adds it up in float32."""
    return any(
        isinstance(state, PartialSum) and state != SUM and item.tensor.dtype == "float16"
        for item, state in zip(call.node.results, result.results, strict=True)
    )


# -- each row, or each element, of its own ---------------------------------------------------------


def _split_elementwise(call: CallToSplit) -> SplitCall | None:
    """Split an operator by rows if each element of its results depends only on the elements of the
    operands at the same index, after broadcasting."""
    shape = call.node.results[0].tensor.shape
    if any(result.tensor.shape != shape for result in call.node.results):
        return None
    split: Rows | None = None
    for name in call.tensors:
        state = call.states.get(name, WHOLE)
        if isinstance(state, Rows):
            aligned = state.shifted(len(shape) - len(call.metas[name].shape))
            if aligned.first < 0 or split not in (None, aligned):
                return None
            split = aligned
    if (
        split is None
        or prod(shape[d] for d in split.dimensions) != split.row_count(call.rows) * split.block
    ):
        return None
    for name in call.tensors:
        sizes, state = call.metas[name].shape, call.states.get(name, WHOLE)
        missing = len(shape) - len(sizes)
        row_sizes = [sizes[d - missing] for d in split.dimensions if d >= missing]
        is_whole = isinstance(state, Whole) and prod(row_sizes) != 1
        if isinstance(state, PartialSum | OfRow) or is_whole:
            return None
    return call.results_in(split)


def _split_fill(call: CallToSplit) -> SplitCall | None:
    """Split a tensor of one number by the rows that its readers want: no operand gives numbers."""
    rows = call.wanted.get(call.node.results[0].name)
    if isinstance(rows, OfRow):
        return call.results_in(rows)
    shape_index = int(call.node.target.startswith("aten.new_"))
    return split_with_shape(call, rows if isinstance(rows, Rows) else None, shape_index)


def _split_stack(call: CallToSplit) -> SplitCall | None:
    """Tensors of the same rows become one, along a new dimension outside of the rows."""
    rows, added = call.common_rows(), call.argument(1, 0) % len(call.node.results[0].tensor.shape)
    if rows is None or rows.first < added < rows.dimensions.stop:
        return None
    return call.results_in(rows.shifted(added <= rows.first))


# -- products and reductions -----------------------------------------------------------------------


def _product_rule(equation: str, first: int = 0) -> Rule:
    """Return the rule of a product of matrices, in the notation of `torch.einsum`.

    It is split along the rows of the left operand, the columns of the right one, a batch dimension,
    or the reduced dimension: then pieces are partial sums. The argument `first` is the left
    operand.
    """
    (left, right), result = equation.split("->")[0].split(","), equation.split("->")[1]

    def rule(call: CallToSplit) -> SplitCall | None:
        operands = call.state(first), call.state(first + 1)
        by_rows = next((state for state in operands if isinstance(state, Rows)), Rows(0))
        for dimension in dict.fromkeys(left + right):
            places = left.find(dimension), right.find(dimension)
            states = tuple(
                replace(by_rows, first=place, count=1) if place >= 0 else WHOLE for place in places
            )
            if states == operands:
                is_reduced = dimension not in result
                rows = replace(by_rows, first=max(0, result.find(dimension)), count=1)
                return call.results_in(SUM if is_reduced else rows)
        return None

    return rule


def _split_product_with_bias(call: CallToSplit) -> SplitCall | None:
    """A matrix product added to a bias: for each row, or one for all. It is split by rows."""
    result, bias, rows = _product_rule("ik,kj->ij", first=1)(call), call.shape(0), call.state(1)
    if result is None or result.results != (rows,) or not isinstance(rows, Rows) or rows.first:
        return None
    if call.state(0) == WHOLE:
        return result if len(bias) == 1 or (len(bias) == 2 and bias[0] == 1) else None
    is_by_rows = (
        call.state(0) == rows
        and len(bias) == 2
        and bias[0] == rows.row_count(call.rows) * rows.block
    )
    return result if is_by_rows else None


def _split_reduction(call: CallToSplit) -> SplitCall | None:
    """Split a reduction by rows if it reduces other dimensions only. If it sums or averages all the
    rows, the pieces are partial sums."""
    rows, shape = call.common_rows(0), call.shape(0)
    if rows is None:
        return None
    name = call.node.target.split(".")[1]
    is_complete = call.node.target in ("aten.sum.default", "aten.mean.default")
    dimensions = None if is_complete else call.argument(1)
    dimensions = (dimensions,) if isinstance(dimensions, int) else dimensions
    reduced = {d % len(shape) for d in dimensions or range(len(shape))}
    keeps = bool(call.keyword("keepdim", 2, False)) and not is_complete
    if reduced.isdisjoint(rows.dimensions):
        removed = 0 if keeps else sum(d < rows.first for d in reduced)
        return call.results_in(rows.shifted(-removed))
    if not reduced.issuperset(rows.dimensions) or name not in ("sum", "mean"):
        return None
    if name == "sum":
        return call.results_in(SUM)
    divisor = float(prod(shape[d] for d in reduced))
    target = "aten.sum.default" if is_complete else "aten.sum.dim_IntList"
    return SplitCall((PartialSum(divisor),), target=target)


# -- shapes and parts ------------------------------------------------------------------------------


def _split_reshape(call: CallToSplit) -> SplitCall | None:
    """Split a reshape by rows if these are adjacent dimensions of its result, too."""
    rows, result = call.common_rows(0), call.node.results[0].tensor.shape
    if rows is None:
        return None
    before = prod(call.shape(0)[: rows.first])
    candidates = candidate_rows(result, call.rows, None, rows.part)
    return split_with_shape(
        call, next((c for c in candidates if prod(result[: c.first]) == before), None)
    )


def _split_expand(call: CallToSplit) -> SplitCall | None:
    """Split an expansion by rows if only other dimensions are expanded."""
    rows, result = call.common_rows(0), call.node.results[0].tensor.shape
    if rows is None:
        return None
    moved = rows.shifted(len(result) - len(call.shape(0)))
    has_rows = prod(result[d] for d in moved.dimensions) == moved.row_count(call.rows) * moved.block
    return split_with_shape(call, moved if has_rows else None)


def _split_permute(call: CallToSplit) -> SplitCall | None:
    """Split a permutation by rows if the dimensions of the rows stay neighbours, in their order."""
    rows, dimensions = call.common_rows(0), len(call.shape(0))
    if rows is None:
        return None
    order = list(range(dimensions))
    if call.node.target == "aten.permute.default":
        order = [d % dimensions for d in call.argument(1)]
    elif dimensions > 1:
        one, other = call.argument(1, 0) % dimensions, call.argument(2, 1) % dimensions
        order[one], order[other] = order[other], order[one]
    places = [order.index(d) for d in rows.dimensions]
    if places != list(range(places[0], places[0] + rows.count)):
        return None
    return call.results_in(replace(rows, first=places[0]))


def _split_unsqueeze(call: CallToSplit) -> SplitCall | None:
    """Split by rows if a dimension is added outside of the dimensions of the rows."""
    rows, added = call.common_rows(0), call.argument(1) % (len(call.shape(0)) + 1)
    if rows is None or rows.first < added < rows.dimensions.stop:
        return None
    return call.results_in(rows.shifted(added <= rows.first))


def _split_squeeze(call: CallToSplit) -> SplitCall | None:
    """Split by rows if dimensions of size 1 outside of the rows are removed."""
    rows, shape, argument = call.common_rows(0), call.shape(0), call.argument(1)
    dimensions = {d % len(shape) for d in ((argument,) if isinstance(argument, int) else argument)}
    if rows is None or not dimensions.isdisjoint(rows.dimensions):
        return None  # a piece of one row would lose the dimension
    return call.results_in(rows.shifted(-sum(d < rows.first and shape[d] == 1 for d in dimensions)))


def _split_flip(call: CallToSplit) -> SplitCall | None:
    """Dimensions other than the rows are reversed."""
    rows, dimensions = call.common_rows(0), len(call.shape(0))
    if rows is None or any(d % dimensions in rows.dimensions for d in call.argument(1)):
        return None
    return call.results_in(rows)


# -- losses and embeddings -------------------------------------------------------------------------


def _split_nll_loss(call: CallToSplit) -> SplitCall | None:
    """The mean is the sum divided by the sum of the weights of targets that are not ignored. In two
    dimensions, the classes are the second one of the scores, and a row is a sample."""
    kind = call.argument(3)
    rows = call.common_rows(0, 1)
    if rows is None or (rows.first, rows.count) != (0, 1):
        return None
    if kind not in (_MEAN, _SUM):
        return SplitCall(tuple(SUM if r.position else rows for r in call.node.results))
    loss = PartialSum(divisor_position=1) if kind == _MEAN else SUM
    if kind == _MEAN and {r.position for r in call.node.results} != {0, 1}:
        return None
    results = tuple(loss if r.position == 0 else SUM for r in call.node.results)
    return SplitCall(results, lambda _: call.args_with(3, _SUM))


def _split_nll_loss_backward(call: CallToSplit) -> SplitCall | None:
    """Split the backward of that loss by rows: each piece reads the sum of weights of all rows."""
    is_reduced = call.argument(4) in (_MEAN, _SUM)
    split = row_rule(1, 2)(call) if is_reduced else row_rule(0, 1, 2)(call)
    rows = call.state(1)
    is_by_samples = isinstance(rows, Rows) and (rows.first, rows.count) == (0, 1)
    return split if is_by_samples else None


def _elementwise_loss_rule(reduction: int) -> Rule:
    """Return the rule of a loss between two tensors of one shape, whose argument with the index
    `reduction` says if it is a mean, a sum or neither. The first two give partial sums."""

    def rule(call: CallToSplit) -> SplitCall | None:
        kind = call.argument(reduction, _MEAN)
        if kind not in (_MEAN, _SUM):
            return _split_elementwise(call)
        if call.common_rows(0, 1) is None or call.shape(0) != call.shape(1) or call.name(2):
            return None  # a weight may be broadcast
        divisor = float(prod(call.shape(0))) if kind == _MEAN else 1.0
        return SplitCall((PartialSum(divisor),), lambda _: call.args_with(reduction, _SUM))

    return rule


def _elementwise_loss_backward_rule(reduction: int) -> Rule:
    """Return the rule of the backward of a loss between two tensors, with the index of its argument
    `reduction`. The operator divides a mean by the elements of a piece, so the gradient of the loss
    is multiplied by the piece's share of the rows."""

    def rule(call: CallToSplit) -> SplitCall | None:
        kind, rows = call.argument(reduction, _MEAN), call.common_rows(1, 2)
        if kind not in (_MEAN, _SUM):
            return _split_elementwise(call)
        if call.shape(1) != call.shape(2) or call.shape(0) or call.name(3) or rows is None:
            return None
        return SplitCall((rows,), scaled=0 if kind == _MEAN else None)

    return rule


def _split_embedding_backward(call: CallToSplit) -> SplitCall | None:
    """Split the gradient of an embedding into partial sums over the rows. None if it is scaled by
    how often each index is among all rows."""
    is_scaled_by_frequency = call.argument(4, False)
    return call.results_in(SUM) if call.common_rows(0, 1) and not is_scaled_by_frequency else None


# -- the table -------------------------------------------------------------------------------------

_UNARY = """
    abs.default acos.default acosh.default alias.default angle.default asin.default asinh.default
    atan.default atanh.default bitwise_not.default ceil.default celu.default clamp.default
    clamp_max.default clamp_min.default clone.default cos.default cosh.default deg2rad.default
    detach.default elu.default erf.default erfc.default erfinv.default exp.default exp2.default
    expm1.default floor.default frac.default full_like.default gelu.default
    hardshrink.default hardsigmoid.default hardswish.default hardtanh.default i0.default
    isinf.default isnan.default leaky_relu.default lgamma.default log.default log10.default
    log1p.default log2.default log_sigmoid_forward.default logical_not.default logit.default
    mish.default nan_to_num.default neg.default ones_like.default positive.default rad2deg.default
    reciprocal.default relu.default relu6.default round.default rsqrt.default sgn.default
    sigmoid.default sign.default signbit.default silu.default sin.default sinc.default sinh.default
    softplus.default softshrink.default sqrt.default square.default tan.default tanh.default
    threshold.default trunc.default zeros_like.default _to_copy.default
"""

_BINARY = """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar
    div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode floor_divide.default fmod.Scalar
    fmod.Tensor remainder.Scalar remainder.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    maximum.default minimum.default fmax.default fmin.default atan2.default hypot.default
    xlogy.Tensor eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar
    gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_and.default logical_or.default
    logical_xor.default bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar
    bitwise_xor.Tensor bitwise_xor.Scalar copysign.Tensor clamp.Tensor clamp_max.Tensor
    clamp_min.Tensor logaddexp.default logaddexp2.default
"""

_TERNARY = """
    addcmul.default addcdiv.default lerp.Scalar lerp.Tensor where.self where.ScalarOther
    where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor
"""

_BACKWARD = """
    elu_backward.default gelu_backward.default hardsigmoid_backward.default
    hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
    log_sigmoid_backward.default mish_backward.default native_dropout_backward.default
    sigmoid_backward.default silu_backward.default softplus_backward.default
    softshrink_backward.default tanh_backward.default threshold_backward.default
"""

_OTHERS: dict[str, Rule] = {
    "mm.default": _product_rule("ik,kj->ij"),
    "addmm.default": _split_product_with_bias,
    "bmm.default": _product_rule("bik,bkj->bij"),
    "_softmax.default": row_rule(mixed=1),
    "_log_softmax.default": row_rule(mixed=1),
    "_softmax_backward_data.default": row_rule(mixed=2),
    "_log_softmax_backward_data.default": row_rule(mixed=2),
    "cumsum.default": row_rule(mixed=1),
    "cumprod.default": row_rule(mixed=1),
    "logcumsumexp.default": row_rule(mixed=1),
    "cummax.default": row_rule(mixed=1),
    "cummin.default": row_rule(mixed=1),
    "flip.default": _split_flip,
    "sort.default": row_rule(mixed=1, default=-1),
    "sort.stable": row_rule(mixed=2, default=-1),
    "topk.default": row_rule(mixed=2, default=-1),
    "gather.default": row_rule(mixed=1),
    "scatter.value": row_rule(mixed=1),
    "scatter.src": row_rule(mixed=1),
    "scatter_add.default": row_rule(mixed=1),
    "split.Tensor": split_chunks,
    "split_with_sizes.default": split_chunks,
    "cat.default": join_rule(row_rule(mixed=1)),
    "stack.default": join_rule(_split_stack),
    "unbind.int": split_unbind,
    "new_zeros.default": _split_fill,
    "new_ones.default": _split_fill,
    "new_full.default": _split_fill,
    "zeros.default": _split_fill,
    "ones.default": _split_fill,
    "full.default": _split_fill,
    "view.default": _split_reshape,
    "_unsafe_view.default": _split_reshape,
    "reshape.default": _split_reshape,
    "expand.default": _split_expand,
    "t.default": _split_permute,
    "transpose.int": _split_permute,
    "permute.default": _split_permute,
    "unsqueeze.default": _split_unsqueeze,
    "squeeze.dim": _split_squeeze,
    "squeeze.dims": _split_squeeze,
    "slice.Tensor": split_slice,
    "select.int": split_select,
    SLICE_BACKWARD.removeprefix("aten."): split_slice_backward,
    SLICE_SCATTER.removeprefix("aten."): split_slice_scatter,
    SELECT_SCATTER.removeprefix("aten."): split_select_scatter,
    "sum.default": _split_reduction,
    "sum.dim_IntList": _split_reduction,
    "mean.default": _split_reduction,
    "mean.dim": _split_reduction,
    "amax.default": _split_reduction,
    "amin.default": _split_reduction,
    "logsumexp.default": _split_reduction,
    "argmax.default": _split_reduction,
    "argmin.default": _split_reduction,
    "max.dim": _split_reduction,
    "min.dim": _split_reduction,
    "any.dim": _split_reduction,
    "all.dim": _split_reduction,
    "prod.dim_int": _split_reduction,
    "var.correction": _split_reduction,
    "native_layer_norm.default": row_rule(0, normalized=1),
    "native_layer_norm_backward.default": row_rule(0, 1, 3, 4, normalized=2, summed=True),
    "_fused_rms_norm.default": row_rule(0, normalized=1),
    "_fused_rms_norm_backward.default": row_rule(0, 1, 3, normalized=2, summed=True),
    "nll_loss_forward.default": _split_nll_loss,
    "nll_loss_backward.default": _split_nll_loss_backward,
    "nll_loss2d_forward.default": _split_nll_loss,
    "nll_loss2d_backward.default": _split_nll_loss_backward,
    "mse_loss.default": _elementwise_loss_rule(2),
    "mse_loss_backward.default": _elementwise_loss_backward_rule(3),
    "binary_cross_entropy.default": _elementwise_loss_rule(3),
    "binary_cross_entropy_backward.default": _elementwise_loss_backward_rule(4),
    "embedding.default": row_rule(1),
    "embedding_dense_backward.default": _split_embedding_backward,
}

RULES: dict[str, Rule] = {
    "prims.convert_element_type.default": _split_elementwise,
    "prims.fma.default": _split_elementwise,
    **{
        f"aten.{name}": _split_elementwise
        for names in (_UNARY, _BINARY, _TERNARY, _BACKWARD)
        for name in names.split()
    },
    **{f"aten.{name}": rule for name, rule in (_OTHERS | IMAGE_RULES).items()},
}
"""The rule of each operator that can be split, by target."""

RESHAPES = frozenset(target for target, rule in RULES.items() if rule is _split_reshape)
"""The operators that join and divide dimensions."""
