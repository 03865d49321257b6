"""Rules of the operators that divide the rows into parts, join parts, or replace some of them.

Where a loss treats sequences of a batch differently, its tensors have a part of the rows
(`Rows.part`), or one of them (`OfRow`). Along other dimensions than the rows, these operators
follow `row_rule`: they work on the same rows of all arguments.
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
    PieceRange,
    Rows,
    SplitCall,
    State,
    piece_shape,
)

Rule = Callable[[CallToSplit], SplitCall | None]

CAT, STACK = "aten.cat.default", "aten.stack.default"

JOINS = (CAT, STACK)
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


def row_rule(
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


def split_with_shape(
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


def split_select(call: CallToSplit) -> SplitCall | None:
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


def split_unbind(call: CallToSplit) -> SplitCall | None:
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


def join_rule(by_rows: Rule) -> Rule:
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
        is_stack = call.node.target == STACK
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
    if call.node.target != CAT or call.argument(1, 0):
        return None
    whole = PieceRange(ranges[0].start, sum(part.rows for part in ranges))
    result = Rows(0, part=None if whole == PieceRange(0, call.rows) else whole)
    refs = [item for item in call.argument(0) if isinstance(item, Ref)]

    def arguments(piece: PieceRange) -> Args:
        pairs = zip(refs, states, strict=True)
        present = (r for r, s in pairs if isinstance(s, Rows) and s.in_piece(piece).rows)
        return call.args_with(0, tuple(present))

    return SplitCall((result,), arguments)


def split_chunks(call: CallToSplit) -> SplitCall | None:
    """Split a division into chunks by rows: along another dimension, or of the rows, if these are
    the first dimension."""
    if (split := row_rule(0, mixed=2)(call)) is not None:
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


def split_slice(call: CallToSplit) -> SplitCall | None:
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


def split_slice_backward(call: CallToSplit) -> SplitCall | None:
    """Split the gradient of a slice by rows, if the slice's dimension is not one of the rows, or if
    the slice is a part of the outermost dimension's rows: then other pieces are zero."""
    split, rows = row_rule(0, mixed=2)(call), call.common_rows(0)
    if split is not None:
        return split_with_shape(call, rows)
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


def split_slice_scatter(call: CallToSplit) -> SplitCall | None:
    """Split a tensor of which a slice is replaced by rows, if the slice's dimension is not one of
    the rows, or if the slice is a part of the outermost dimension's rows: then other pieces stay as
    they are."""
    if (split := row_rule(0, 1, mixed=2)(call)) is not None:
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


def split_select_scatter(call: CallToSplit) -> SplitCall | None:
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
