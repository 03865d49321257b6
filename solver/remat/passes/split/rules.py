"""Rules of the operators that can be split: `RULES` has a line for each.

A rule gives the states of an operation's results from the states of its arguments; None if it
cannot be split so. An operator without a rule ends a region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from remat.documents.arguments import Args, Ref
from remat.passes.split.states import (
    SUM,
    WHOLE,
    CallToSplit,
    OfRow,
    PartialSum,
    PieceRange,
    Rows,
    SplitCall,
    State,
    Whole,
    candidate_rows,
    piece_shape,
)

Rule = Callable[[CallToSplit], SplitCall | None]

_MEAN, _SUM = 1, 2
"""Values of the argument `reduction` of torch's losses."""

JOINS = ("aten.cat.default", "aten.stack.default")
"""The operators that join tensors of one row each."""

SELECTIONS = ("aten.select.int", "aten.unbind.int")
"""The operators that give tensors of one row each."""

DIVISIONS = ("aten.slice.Tensor", "aten.split.Tensor", "aten.split_with_sizes.default")
"""The operators that give parts of the rows."""

SLICE_BACKWARD = "aten.slice_backward.default"
SLICE_SCATTER = "aten.slice_scatter.default"
SELECT_SCATTER = "aten.select_scatter.default"

_MAX_INDEX = 2**63 - 1
"""The end of a slice up to the last element."""


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


def _row_rule(
    *arguments: int,
    mixed: int | None = None,
    default: int = 0,
    normalized: int | None = None,
    summed: bool = False,
) -> Rule:
    """Return the rule of an operator that works on the same rows of these `arguments`, or of all
    tensors without any; other tensors are whole.

    Elements are mixed along the dimension in the argument `mixed`, by default `default`, or along
    as many of the last ones as the shape in the argument `normalized` has: these must not be rows.
    Results have the same rows; if `summed`, only the first one has, and others are sums.
    """

    def rule(call: CallToSplit) -> SplitCall | None:
        rows = call.common_rows(*arguments)
        if rows is None:
            return None
        dimensions = len(
            call.metas[call.name(arguments[0]) if arguments else call.tensors[0]].shape
        )
        mixed_dimension = 0 if mixed is None else call.keyword("dim", mixed, default)
        if mixed is not None and mixed_dimension % dimensions in rows.dimensions:
            return None
        inner = 0 if normalized is None else len(call.argument(normalized))
        if rows.dimensions.stop > dimensions - inner:
            return None
        return SplitCall(tuple(SUM if summed and r.position else rows for r in call.node.results))

    return rule


def _split_fill(call: CallToSplit) -> SplitCall | None:
    """Split a tensor of one number by the rows that its readers want: no operand gives numbers."""
    rows = call.wanted.get(call.node.results[0].name)
    if isinstance(rows, OfRow):
        return call.results_in(rows)
    shape_index = int(call.node.target.startswith("aten.new_"))
    return _split_with_shape(call, rows if isinstance(rows, Rows) else None, shape_index)


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
    return _split_with_shape(
        call, next((c for c in candidates if prod(result[: c.first]) == before), None)
    )


def _split_expand(call: CallToSplit) -> SplitCall | None:
    """Split an expansion by rows if only other dimensions are expanded."""
    rows, result = call.common_rows(0), call.node.results[0].tensor.shape
    if rows is None:
        return None
    moved = rows.shifted(len(result) - len(call.shape(0)))
    has_rows = prod(result[d] for d in moved.dimensions) == moved.row_count(call.rows) * moved.block
    return _split_with_shape(call, moved if has_rows else None)


def _split_with_shape(
    call: CallToSplit, rows: Rows | None, shape_index: int = 1
) -> SplitCall | None:
    """Return the split call whose result has these rows, and whose argument at `shape_index` is the
    shape of a piece; None without rows."""
    if rows is None:
        return None
    shape = call.node.results[0].tensor.shape

    def arguments(piece: PieceRange) -> Args:
        return call.args_with(shape_index, piece_shape(shape, rows, rows.in_piece(piece).rows))

    return SplitCall((rows,), arguments)


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


def _split_select(call: CallToSplit) -> SplitCall | None:
    """An index of a dimension that is not one of the rows, or one row of the first dimension."""
    rows, shape = call.common_rows(0), call.shape(0)
    dimension = call.argument(1, 0) % len(shape)
    if rows is None:
        return None
    if dimension not in rows.dimensions:
        return call.results_in(rows.shifted(-(dimension < rows.first)))
    if not _are_outermost(call, rows):
        return None
    row = call.argument(2) % shape[0]
    return SplitCall((OfRow(row),), lambda piece: call.args_with(2, row - piece.start))


def _split_unbind(call: CallToSplit) -> SplitCall | None:
    """All rows of the first dimension, each of its own."""
    rows = call.common_rows(0)
    if rows is None or call.argument(1, 0) % len(call.shape(0)) or not _are_outermost(call, rows):
        return None
    positions = [result.position for result in call.node.results]
    if positions != list(range(call.rows)):  # some results are left out
        return None
    return SplitCall(tuple(map(OfRow, positions)))


def _are_outermost(call: CallToSplit, rows: Rows) -> bool:
    """True if the rows of the first argument are its first dimension, also in memory."""
    return rows == Rows(0) and call.metas[call.name(0)].is_row_major()


def _join_rule(by_rows: Rule) -> Rule:
    """Return the rule of an operator that joins tensors of one row each, in the order of the rows,
    along the first dimension. Tensors by rows follow the rule `by_rows`."""

    def rule(call: CallToSplit) -> SplitCall | None:
        names = [item.name for item in call.argument(0) if isinstance(item, Ref)]
        states = [call.states.get(name, WHOLE) for name in names]
        if joined := _joined_parts(call, states):
            return joined
        if not any(isinstance(state, OfRow) for state in states):
            return by_rows(call)
        shapes = {call.metas[name].shape for name in names}
        if states != [OfRow(row) for row in range(call.rows)] or len(shapes) > 1:
            return None
        (shape,) = shapes
        is_stack = call.node.target == "aten.stack.default"
        if call.argument(1, 0) % max(1, len(shape) + is_stack):
            return None
        refs = tuple(map(Ref, names))
        return SplitCall(
            (Rows(0, block=1 if is_stack else shape[0]),),
            lambda piece: call.args_with(0, refs[piece.start : piece.start + piece.rows]),
        )

    return rule


def _joined_parts(call: CallToSplit, states: list[State]) -> SplitCall | None:
    """Return the split call that joins neighbouring parts of the rows along the first dimension;
    None for other tensors."""
    parts = [state.part for state in states if isinstance(state, Rows)]
    ranges = [part for part in parts if part is not None]
    is_in_order = all(one.stop == other.start for one, other in pairwise(ranges))
    plain = {replace(state, part=None) for state in states if isinstance(state, Rows)}
    if len(ranges) < max(2, len(states)) or not is_in_order or plain != {Rows(0)}:
        return None
    if call.node.target != "aten.cat.default" or call.argument(1, 0):
        return None
    whole = PieceRange(ranges[0].start, sum(part.rows for part in ranges))
    result = Rows(0, part=None if whole == PieceRange(0, call.rows) else whole)
    refs = [item for item in call.argument(0) if isinstance(item, Ref)]

    def arguments(piece: PieceRange) -> Args:
        pairs = zip(refs, states, strict=True)
        present = (r for r, s in pairs if isinstance(s, Rows) and s.in_piece(piece).rows)
        return call.args_with(0, tuple(present))

    return SplitCall((result,), arguments)


def _split_chunks(call: CallToSplit) -> SplitCall | None:
    """Split a division into chunks by rows: along another dimension, or of the rows, if these are
    the first dimension."""
    if (split := _row_rule(0, mixed=2)(call)) is not None:
        return split
    rows, results = call.common_rows(0), call.node.results
    if rows is None or rows.count > 1 or call.argument(2, 0):
        return None
    ends = [0, *accumulate(result.tensor.shape[0] for result in results)]
    parts = [_part_of_rows(call, rows, 0, *pair) for pair in pairwise(ends)]
    is_complete = [r.position for r in results] == list(range(len(results)))
    if len(results) < 2 or any(part is None for part in parts) or not is_complete:
        return None
    if ends[-1] != call.shape(0)[0]:  # some results are left out
        return None

    def arguments(piece: PieceRange) -> Args:
        sizes = (part.in_piece(piece).rows for part in parts if part is not None)
        return (call.node.args[0], tuple(size for size in sizes if size), 0)

    states = tuple(part for part in parts if part is not None)
    return SplitCall(states, arguments, target="aten.split_with_sizes.default")


def _split_slice(call: CallToSplit) -> SplitCall | None:
    """Split a slice by rows, if its dimension is not one of the rows, if it selects all rows, or if
    it selects a range of the rows, which are the outermost dimensions."""
    rows, shape = call.common_rows(0), call.shape(0)
    dimension = call.argument(1, 0) % len(shape)
    if rows is None:
        return None
    if dimension not in rows.dimensions:
        return call.results_in(rows)
    if call.node.results[0].tensor.shape == shape:
        return SplitCall((rows,), lambda _: (call.node.args[0], dimension, 0, _MAX_INDEX))
    start, stop, step = slice(*call.node.args[2:5]).indices(shape[dimension])
    part = _part_of_rows(call, rows, dimension, start, stop)
    if part is None or step != 1:
        return None
    last = rows.dimensions[-1]

    def arguments(piece: PieceRange) -> Args:
        first = rows.in_piece(piece).start + (rows.part.start if rows.part else 0)
        assert part.part is not None
        begin = max(part.part.start, first) - first
        return (call.node.args[0], last, begin, begin + part.in_piece(piece).rows)

    return SplitCall((part,), arguments)


def _part_of_rows(
    call: CallToSplit, rows: Rows, dimension: int, start: int, stop: int
) -> Rows | None:
    """Return the rows of a slice of the first argument along the first of the dimensions that are
    the rows; None if these are not its outermost dimensions, or have several elements each."""
    shape = call.shape(0)
    if dimension or rows.first or rows.block > 1 or stop <= start:
        return None
    if not call.metas[call.name(0)].is_row_major():
        return None
    inner = prod(shape[1 : rows.count])
    first = 0 if rows.part is None else rows.part.start
    return replace(rows, part=PieceRange(first + start * inner, (stop - start) * inner))


def _split_flip(call: CallToSplit) -> SplitCall | None:
    """Dimensions other than the rows are reversed."""
    rows, dimensions = call.common_rows(0), len(call.shape(0))
    if rows is None or any(d % dimensions in rows.dimensions for d in call.argument(1)):
        return None
    return call.results_in(rows)


def _split_slice_backward(call: CallToSplit) -> SplitCall | None:
    """Split the gradient of a slice by rows, if the slice's dimension is not one of the rows, or if
    the slice is a part of the outermost dimension's rows: then other pieces are zero."""
    split, rows = _row_rule(0, mixed=2)(call), call.common_rows(0)
    if split is not None:
        return _split_with_shape(call, rows)
    part = None if rows is None else rows.part
    if rows is None or part is None or rows.first or rows.block > 1:
        return None
    shape: tuple[int, ...] = call.argument(1)
    start, stop, step = slice(*(call.argument(n) for n in (3, 4, 5))).indices(shape[0])
    inner = prod(shape[1 : rows.count])
    if call.argument(2) or step != 1 or part.rows != (stop - start) * inner:
        return None
    first = part.start - start * inner
    whole = PieceRange(first, shape[0] * inner)
    if first < 0 or whole.stop > call.rows:  # padded to another place than it was taken from
        return None
    result = replace(rows, part=None if whole == PieceRange(0, call.rows) else whole)
    last = rows.dimensions[-1]

    def arguments(piece: PieceRange) -> Args:
        here, mine = result.in_piece(piece), rows.in_piece(piece)
        begin = max(0, part.start - first - here.start)
        sizes = piece_shape(shape, result, here.rows)
        return (call.node.args[0], sizes, last, begin, begin + mine.rows, 1)

    return SplitCall((result,), arguments, other_pieces="zero")


def _split_slice_scatter(call: CallToSplit) -> SplitCall | None:
    """Split a tensor of which a slice is replaced by rows, if the slice's dimension is not one of
    the rows, or if the slice is a part of the outermost dimension's rows: then other pieces stay as
    they are."""
    if (split := _row_rule(0, 1, mixed=2)(call)) is not None:
        return split
    rows, part_rows = call.state(0), call.state(1)
    if not isinstance(rows, Rows) or not isinstance(part_rows, Rows) or part_rows.part is None:
        return None
    part, shape = part_rows.part, call.shape(0)
    start, stop, step = slice(*(call.argument(n) for n in (3, 4, 5))).indices(shape[0])
    inner = prod(shape[1 : rows.count])
    first = 0 if rows.part is None else rows.part.start
    is_same = (first + start * inner, (stop - start) * inner) == part
    if rows.first or rows.block > 1 or call.argument(2, 0) or step != 1 or not is_same:
        return None

    def arguments(piece: PieceRange) -> Args:
        begin = max(0, part.start - first - rows.in_piece(piece).start)
        end = begin + part_rows.in_piece(piece).rows
        return (*call.node.args[:2], rows.dimensions[-1], begin, end)

    return SplitCall((rows,), arguments, other_pieces="first")


def _split_select_scatter(call: CallToSplit) -> SplitCall | None:
    """Split a tensor of which an index is replaced by rows, if the index is of another dimension,
    or is a row of the first dimension: then other pieces stay as they are."""
    rows, replaced, dimension = call.state(0), call.state(1), call.argument(2)
    if not isinstance(rows, Rows) or rows.part is not None:
        return None
    if dimension not in rows.dimensions:
        expected = rows.shifted(-(dimension < rows.first))
        return call.results_in(rows) if replaced == expected else None
    row = call.argument(3) % call.shape(0)[dimension]
    if not _are_outermost(call, rows) or replaced not in (OfRow(row), WHOLE):
        return None
    return SplitCall(
        (rows,),
        lambda piece: (*call.node.args[:3], row - piece.start),
        other_pieces="first",
        row=row,
    )


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
    split = _row_rule(1, 2)(call) if is_reduced else _row_rule(0, 1, 2)(call)
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
    "_softmax.default": _row_rule(mixed=1),
    "_log_softmax.default": _row_rule(mixed=1),
    "_softmax_backward_data.default": _row_rule(mixed=2),
    "_log_softmax_backward_data.default": _row_rule(mixed=2),
    "cumsum.default": _row_rule(mixed=1),
    "cumprod.default": _row_rule(mixed=1),
    "logcumsumexp.default": _row_rule(mixed=1),
    "cummax.default": _row_rule(mixed=1),
    "cummin.default": _row_rule(mixed=1),
    "flip.default": _split_flip,
    "sort.default": _row_rule(mixed=1, default=-1),
    "sort.stable": _row_rule(mixed=2, default=-1),
    "topk.default": _row_rule(mixed=2, default=-1),
    "gather.default": _row_rule(mixed=1),
    "scatter.value": _row_rule(mixed=1),
    "scatter.src": _row_rule(mixed=1),
    "scatter_add.default": _row_rule(mixed=1),
    "split.Tensor": _split_chunks,
    "split_with_sizes.default": _split_chunks,
    "cat.default": _join_rule(_row_rule(mixed=1)),
    "stack.default": _join_rule(_split_stack),
    "unbind.int": _split_unbind,
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
    "slice.Tensor": _split_slice,
    "select.int": _split_select,
    SLICE_BACKWARD.removeprefix("aten."): _split_slice_backward,
    SLICE_SCATTER.removeprefix("aten."): _split_slice_scatter,
    SELECT_SCATTER.removeprefix("aten."): _split_select_scatter,
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
    "native_layer_norm.default": _row_rule(0, normalized=1),
    "native_layer_norm_backward.default": _row_rule(0, 1, 3, 4, normalized=2, summed=True),
    "_fused_rms_norm.default": _row_rule(0, normalized=1),
    "_fused_rms_norm_backward.default": _row_rule(0, 1, 3, normalized=2, summed=True),
    "nll_loss_forward.default": _split_nll_loss,
    "nll_loss_backward.default": _split_nll_loss_backward,
    "nll_loss2d_forward.default": _split_nll_loss,
    "nll_loss2d_backward.default": _split_nll_loss_backward,
    "mse_loss.default": _elementwise_loss_rule(2),
    "mse_loss_backward.default": _elementwise_loss_backward_rule(3),
    "binary_cross_entropy.default": _elementwise_loss_rule(3),
    "binary_cross_entropy_backward.default": _elementwise_loss_backward_rule(4),
    "embedding.default": _row_rule(1),
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
    **{f"aten.{name}": rule for name, rule in _OTHERS.items()},
}
"""The rule of each operator that can be split, by target."""

RESHAPES = frozenset(target for target, rule in RULES.items() if rule is _split_reshape)
"""The operators that join and divide dimensions."""
