"""How a tensor relates to the pieces of a split operation: by rows, whole, or as a partial sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from remat.documents.arguments import Args, Argument, Ref
from remat.documents.records import Node, TensorMeta


class PieceRange(NamedTuple):
    """A range of rows, such as a piece's: the first, and how many."""

    start: int
    rows: int

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self.rows

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and self.start <= row < self.stop


@dataclass(frozen=True, slots=True)
class Rows:
    """Each piece has some of the rows: `count` dimensions from `first` on, as one dimension. A row
    is `block` elements of that: of 8 x 16 tokens as one dimension, a row of 16 is a sequence.

    A tensor with a `part` has only these of the region's rows, such as the chosen ones of chosen
    and rejected sequences: pieces without any of them leave it out.
    """

    first: int
    count: int = 1
    block: int = 1
    part: PieceRange | None = None

    @property
    def dimensions(self) -> range:
        """The indices of the dimensions that are the rows."""
        return range(self.first, self.first + self.count)

    def row_count(self, rows: int) -> int:
        """Return the number of rows of the tensor, in a region of so many."""
        return rows if self.part is None else self.part.rows

    def in_piece(self, piece: PieceRange) -> PieceRange:
        """Return the rows of the tensor that a piece has, counted from the tensor's first one."""
        part = self.part or PieceRange(0, piece.stop)
        start = max(piece.start, part.start)
        return PieceRange(start - part.start, max(0, min(piece.stop, part.stop) - start))

    def shifted(self, by: int) -> Rows:
        """Return the rows of a tensor that has `by` more dimensions before them."""
        return replace(self, first=self.first + by)


@dataclass(frozen=True, slots=True)
class OfRow:
    """The tensor is of one row: only the piece with that row computes it."""

    row: int


@dataclass(frozen=True, slots=True)
class Whole:
    """Each piece reads all of the tensor."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Each piece computes a tensor of the full shape, and the result is their sum. It is divided by
    `divisor`, or by the operation's result at position `divisor_position`, if not None, once that
    is summed, too."""

    divisor: float = 1.0
    divisor_position: int | None = None


State: TypeAlias = Rows | OfRow | Whole | PartialSum

WHOLE, SUM = Whole(), PartialSum()


@dataclass(frozen=True)
class CallToSplit:
    """An operation, the metadata of all tensors, and the states of the ones that it reads.

    `wanted` has the states in which other operations read its results, where that is known.
    """

    node: Node
    metas: Mapping[str, TensorMeta]
    states: Mapping[str, State]
    rows: int
    wanted: Mapping[str, State] = field(default_factory=dict)

    def argument(self, index: int, default: Argument = None) -> Any:
        """Return an argument, or the default if the call leaves it out."""
        return self.node.args[index] if index < len(self.node.args) else default

    def keyword(self, name: str, index: int, default: Argument = None) -> Any:
        """Return an argument that the call may pass by its name."""
        return self.node.kwargs.get(name, self.argument(index, default))

    def name(self, index: int) -> str:
        """Return the name of an argument that is a tensor; "" if it is none."""
        argument = self.argument(index)
        return argument.name if isinstance(argument, Ref) else ""

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of an argument that is a tensor."""
        return self.metas[self.name(index)].shape

    def state(self, index: int) -> State:
        """Return the state of an argument; an argument that is no tensor counts as whole."""
        return self.states.get(self.name(index), WHOLE)

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors that the operation reads, each once."""
        return list(dict.fromkeys(self.node.operand_names))

    def common_rows(self, *by_rows: int) -> Rows | None:
        """Return the rows of the arguments with the indices `by_rows`, by default of all tensors.
        None unless all of these have the same rows, and all other tensors are whole."""
        names = [self.name(index) for index in by_rows] or self.tensors
        rows, *others = {self.states.get(name, WHOLE) for name in names}
        are_whole = all(self.states.get(n, WHOLE) == WHOLE for n in self.tensors if n not in names)
        return rows if isinstance(rows, Rows) and not others and are_whole else None

    def args_with(self, index: int, argument: Argument) -> Args:
        """Return the arguments with another one at `index`; missing ones before it are None."""
        missing = (None,) * (index - len(self.node.args))
        return (*self.node.args[:index], *missing, argument, *self.node.args[index + 1 :])

    def results_in(self, state: State) -> SplitCall:
        """Return the split call of which all results are in this state, with the same arguments."""
        return SplitCall((state,) * len(self.node.results))


@dataclass(frozen=True)
class SplitCall:
    """The states of an operation's results, and what a piece of it calls.

    `results` has a state for each of the node's results. `arguments` returns the arguments of a
    piece, if they differ from the whole operation's; `target` is its operator, if another. The
    argument with the index `scaled` is multiplied by the piece's share of the rows. A piece without
    rows of the operands, or without the `row`, is left out; or `other_pieces` says that it is zero,
    or equal to the piece of the first argument.
    """

    results: tuple[State, ...]
    arguments: Callable[[PieceRange], Args] | None = None
    target: str = ""
    scaled: int | None = None
    other_pieces: Literal["", "zero", "first"] = ""
    row: int | None = None


def candidate_rows(
    shape: Sequence[int],
    rows: int,
    blocks: Collection[int] | None = (),
    part: PieceRange | None = None,
) -> Iterator[Rows]:
    """Yield each run of adjacent dimensions whose sizes multiply to `rows`, then each dimension of
    so many rows of several elements: of one of the `blocks`, or of any number if that is None. With
    a `part`, the tensor has only these rows."""
    rows = rows if part is None else part.rows
    if rows < 1:
        return
    for first in range(len(shape)):
        for count in range(1, len(shape) - first + 1):
            product = prod(shape[first : first + count])
            if product == rows:
                yield Rows(first, count, part=part)
            if product >= rows:
                break
    for first, size in enumerate(shape):
        block = size // rows
        if block > 1 and block * rows == size and (blocks is None or block in blocks):
            yield Rows(first, block=block, part=part)


def piece_shape(shape: Sequence[int], state: Rows, piece_rows: int) -> tuple[int, ...]:
    """Return the shape of a piece with so many rows: where several dimensions are the rows, all but
    the last have size 1."""
    sizes = (1,) * (state.count - 1) + (piece_rows * state.block,)
    return (*shape[: state.first], *sizes, *shape[state.first + state.count :])


def piece_meta(
    meta: TensorMeta, state: Rows, piece_rows: int, *, is_slice: bool = False
) -> TensorMeta | None:
    """Return the metadata of a piece with so many rows, in the memory layout of the whole tensor: a
    tensor of its own, or a slice of the whole tensor, with its strides.

    None if the rows are not evenly spaced in memory, or if a tensor of its own would start after
    its first row.
    """
    elements = prod(meta.shape[d] for d in state.dimensions)
    piece_elements = piece_rows * state.block
    row_stride, offset = rows_stride(meta, state), meta.offset
    if row_stride is None:
        return None
    if not is_slice and row_stride and offset >= row_stride:
        if state.part is None or state.first:
            return None
        offset -= state.part.start * state.block * row_stride  # a view of a part of the rows
        if not 0 <= offset < row_stride:
            return None

    def scaled(stride: int) -> int:
        """Return the stride of a dimension: smaller if the rows are inside of it."""
        contains_rows = not is_slice and row_stride and stride >= row_stride * elements
        return stride * piece_elements // elements if contains_rows else stride

    strides = [scaled(stride) for stride in meta.stride]
    for dimension in state.dimensions:
        strides[dimension] = row_stride * (
            1 if dimension == state.dimensions[-1] else max(piece_elements, 1)
        )
    return meta.model_copy(
        update={
            "shape": piece_shape(meta.shape, state, piece_rows),
            "stride": tuple(strides),
            "offset": offset,
        }
    )


def rows_stride(meta: TensorMeta, state: Rows) -> int | None:
    """Return the distance in memory of neighbouring elements of the rows; None if it varies."""
    dimensions = [d for d in state.dimensions if meta.shape[d] > 1]
    for outer, inner in pairwise(dimensions):
        if meta.stride[outer] != meta.stride[inner] * meta.shape[inner]:
            return None
    return meta.stride[dimensions[-1] if dimensions else state.dimensions[-1]]
