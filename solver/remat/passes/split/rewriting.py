"""The rewriting: a trace in which the operations of a region run on some of the rows at a time.

The region's operations become stages. A stage runs once for each piece, its operations in their
order; a result that is read in full later exists only after the last piece: rows are joined, and
summands added. Pieces of tensors that only pieces read never exist as a whole.

In the backward, rows are written into one buffer and sums are added in place, so that each piece
depends on the one before. In the forward both are new tensors, which a schedule may recompute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations
from math import prod

from remat.documents.arguments import Args, Argument, Kwargs, Literal, Ref
from remat.documents.records import Node, Result, SplitRecord
from remat.documents.targets import ADD_PRODUCT_TARGET, ADD_TARGET, WRITE_ROWS_TARGET
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.passes.split.regions import Region
from remat.passes.split.stages import completed_tensors, ordered_stage_groups, split_bytes
from remat.passes.split.states import (
    OfRow,
    PartialSum,
    PieceRange,
    Rows,
    SplitCall,
    State,
    piece_meta,
    piece_shape,
    rows_stride,
)
from remat.passes.trace_writer import TraceWriter, unmeasured

_MAX_SCALAR_BYTES = 8
"""The bytes of a scalar in the largest dtype that gradients are computed in."""


def split_regions(regions: Sequence[Region], pieces: Sequence[int]) -> Trace:
    """Return the trace of these regions with the operations of each in so many pieces.

    The first pieces have one row more if the rows cannot be divided evenly. Operations of pieces
    have no costs: measure the trace once more. Raises `RematError` unless there are at least two
    pieces and at most as many as rows, if one of the regions reads or produces tensors that another
    produces, or if there is no order in which their pieces can run.
    """
    old = regions[0].trace
    for region, number in zip(regions, pieces, strict=True):
        if not 2 <= number <= region.rows:
            raise RematError(f"{region.rows} rows cannot be split into {number} pieces")
    if any(one.depends_on(other) for one, other in permutations(regions, 2)):
        raise RematError("regions with tensors in common cannot be split at once")
    parts = [completed_tensors(region) for region in regions]
    replaced = {
        old.nodes[index].name
        for region, (_, kept_views) in zip(regions, parts, strict=True)
        for index in region.split_calls.keys() - kept_views
    }
    writer = TraceWriter(old, frozenset(replaced))
    rewritings = [
        _RegionRewriting(region, completed, _piece_rows(region.rows, number), writer)
        for region, (completed, _), number in zip(regions, parts, pieces, strict=True)
    ]
    all_kept_views = {index for _, kept_views in parts for index in kept_views}
    for group, members in ordered_stage_groups(regions, all_kept_views):
        if group.kind == "stage":
            rewritings[group.region].write_stage(members)
        else:
            writer.add(old.nodes[members[0]])
    records = [r.record(with_previous=i > 0) for i, r in enumerate(rewritings)]
    return writer.trace(splits=(*old.splits, *records))


def _piece_rows(rows: int, pieces: int) -> tuple[int, ...]:
    """Return the number of rows of each piece: as even as possible."""
    small, larger = divmod(rows, pieces)
    return (small + 1,) * larger + (small,) * (pieces - larger)


@dataclass(frozen=True)
class _Piece:
    """A piece: its number, its rows, and if it is the first or last one of an operation."""

    number: int
    range: PieceRange
    is_first: bool = False
    is_last: bool = False


class _RegionRewriting:
    """Writes the pieces of a region's operations: its state is what exists so far of each tensor.

    `completed` are the tensors that are needed as a whole.
    """

    def __init__(
        self,
        region: Region,
        completed: set[str],
        piece_rows: Sequence[int],
        writer: TraceWriter,
    ) -> None:
        self.region, self.old, self.completed, self.writer = region, region.trace, completed, writer
        starts = accumulate(piece_rows, initial=0)
        self.pieces = [
            _Piece(number, PieceRange(start, rows))
            for number, (start, rows) in enumerate(zip(starts, piece_rows, strict=False))
        ]
        self.piece_name: dict[tuple[str, int], str] = {}
        self.storage_of_piece: dict[tuple[int, int], int] = {}
        self.begins: dict[int, tuple[int, int]] = {}
        """The first row in the storage of a piece, and the elements of the whole tensor before
        it."""
        self.total: dict[str, str] = {}  # the running sum, or the buffer, of a tensor
        self.scalar_bytes = _bytes_of_large_scalars(region)
        for storage, size_bytes in self.scalar_bytes.items():
            self.writer.storage_bytes[storage] = size_bytes

    def write_stage(self, members: Sequence[int]) -> None:
        """Write the operations of a stage, one piece after the other."""
        for piece in self.pieces:
            self.writer.piece = piece.number
            for index in members:
                self._write_piece(index, piece)

    def record(self, *, with_previous: bool) -> SplitRecord:
        """Return the record of the split; `with_previous` if it was made at once with the split
        before."""
        region = self.region
        return SplitRecord(
            seed=region.seed,
            first_dimension=region.seed_rows.first,
            dimension_count=region.seed_rows.count,
            rows=region.rows,
            pieces=len(self.pieces),
            module=self._largest_module(),
            split_bytes=split_bytes(region),
            with_previous=with_previous,
        )

    def _largest_module(self) -> str:
        """Return the path of the module to which most bytes of the split tensors belong; "" if all
        are outside of modules, as a loss often is."""
        sizes_bytes: Counter[str] = Counter()
        for index in self.region.split_calls:
            node = self.old.nodes[index]
            for result in () if node.view else node.results:
                sizes_bytes[node.module] += self.old.storage_bytes[result.storage]
        return max(sizes_bytes, key=lambda module: (module != "", sizes_bytes[module]), default="")

    # -- pieces -----------------------------------------------------------------------------------

    def _write_piece(self, index: int, piece: _Piece) -> None:
        """Write the operation's call for one piece, and append its results to the tensors that are
        needed as a whole."""
        node, split = self.old.nodes[index], self.region.split_calls[index]
        states = dict(zip((r.name for r in node.results), split.results, strict=True))
        results = [r for r in node.results if _is_in_piece(states[r.name], piece)]
        writing = [p.number for p in self.pieces if self._writes(index, p)]
        if not results or piece.number not in writing:
            return
        first, last = writing[0], writing[-1]
        piece = replace(piece, is_first=piece.number == first, is_last=piece.number == last)
        if not self._has_rows(node, split, piece):
            self._write_outside(node, split, results[0], piece)
            return
        args = split.arguments(piece.range) if split.arguments else node.args
        if split.scaled is not None:
            args = self._with_scaled_argument(node, args, split.scaled, piece)
        changed = node.model_copy(update={"args": args})
        renamed = {
            name: self._piece_of_tensor(name, piece, node)
            for name in changed.operand_names
            if isinstance(self.region.states.get(name), Rows | OfRow)
        }
        call = unmeasured(
            node,
            name=self.writer.new_name(f"{node.name}_piece_{piece.number}"),
            target=split.target or node.target,
            args=args,
            piece_of=node.name,
            piece=piece.number,
        ).with_operands(renamed)
        sums = [r for r in node.results if isinstance(states[r.name], PartialSum)]
        if self._can_add_product(node, sums, piece):
            self._write_added_product(call, sums[0], piece)
            return
        source = next(iter(renamed.values())) if node.view else ""
        piece_results = [
            self._piece_result(result, states[result.name], piece, source) for result in results
        ]
        if len(results) < len(node.results):  # the rows of this piece
            first = results[0].position
            piece_results = [
                r.model_copy(update={"position": r.position - first}) for r in piece_results
            ]
        self.writer.add(call.model_copy(update={"results": tuple(piece_results)}))
        for result in results:
            if result.storage in self.scalar_bytes:
                self._copy_scalar(node, result, piece)
            if isinstance(states[result.name], PartialSum):
                self._add_summand(node, result, piece)
            elif result.name in self.completed and isinstance(states[result.name], Rows):
                self._append_piece(node, result, states[result.name], piece)
        if piece.is_last:
            self._divide_sums(node, states)

    def _writes(self, index: int, piece: _Piece) -> bool:
        """True if an operation is written for a piece."""
        node, split = self.old.nodes[index], self.region.split_calls[index]
        is_in_piece = any(_is_in_piece(state, piece) for state in split.results)
        return is_in_piece and (bool(split.other_pieces) or self._has_rows(node, split, piece))

    def _has_rows(self, node: Node, split: SplitCall, piece: _Piece) -> bool:
        """True if a piece has some of the rows that an operation works on."""
        if split.row is not None:
            return split.row in piece.range
        states = (self.region.states.get(name) for name in node.operand_names)
        parts = [state for state in states if isinstance(state, Rows) and state.part]
        return not parts or any(state.in_piece(piece.range).rows for state in parts)

    def _write_outside(self, node: Node, split: SplitCall, result: Result, piece: _Piece) -> None:
        """Write a piece of a result that has none of the rows which the operation works on: zeros,
        or the piece of the first argument as it is."""
        (state,) = split.results
        if split.other_pieces == "first":
            name = self._piece_of_tensor(node.operand_names[0], piece, node)
            self.piece_name[result.name, piece.number] = name
        else:
            zeros = self._piece_result(result, state, piece, "")
            kwargs: Kwargs = {
                "dtype": Literal("dtype", zeros.tensor.dtype),
                "device": Literal("device", self.old.device),
            }
            call = unmeasured(
                node,
                name=self.writer.new_name(f"{node.name}_piece_{piece.number}"),
                target="aten.zeros.default",
                args=(zeros.tensor.shape,),
                kwargs=kwargs,
                results=(zeros,),
                piece_of=node.name,
                piece=piece.number,
            )
            self.writer.add(call)
        if result.name in self.completed:
            self._append_piece(node, result, state, piece)

    def _piece_result(self, result: Result, state: State, piece: _Piece, source: str) -> Result:
        """Return the result of a piece in this state, and remember its name. A view is in the
        storage of the tensor `source`, which is "" for other operations."""
        name = self.writer.new_name(f"{result.name}_piece_{piece.number}")
        self.piece_name[result.name, piece.number] = name
        if result.storage in self.scalar_bytes:
            storage = self._piece_storage(result.storage, piece, Rows(0))
            return result.model_copy(update={"name": name, "storage": storage})
        if isinstance(state, OfRow):
            return self._result_of_row(result, name, piece, source)
        if not isinstance(state, Rows):
            storage = self.writer.new_storage(self.old.storage_bytes[result.storage])
            return result.model_copy(update={"name": name, "storage": storage})
        if source:
            storage = self.writer.storage_of(source)
        else:
            storage = self._piece_storage(result.storage, piece, state)
        is_slice = storage < len(self.old.storage_bytes)  # of a tensor from outside of the region
        own_rows = state.in_piece(piece.range)
        tensor = piece_meta(result.tensor, state, own_rows.rows, is_slice=is_slice)
        assert tensor is not None
        row_stride = state.block * (rows_stride(result.tensor, state) or 0)
        first = own_rows.start + (state.part.start if state.part else 0)
        if is_slice:
            offset = tensor.offset + own_rows.start * row_stride
            tensor = tensor.model_copy(update={"offset": offset})
        else:
            begin, _ = self.begins.setdefault(storage, (first, first * row_stride))
            if source and first > begin:  # a view of a part of the rows
                offset = tensor.offset + (first - begin) * row_stride
                tensor = tensor.model_copy(update={"offset": offset})
        return result.model_copy(update={"name": name, "tensor": tensor, "storage": storage})

    def _result_of_row(self, result: Result, name: str, piece: _Piece, source: str) -> Result:
        """Return a result of one row. It keeps its name if other operations read it; a view is in
        the storage of the tensor `source`, which may be a piece."""
        if result.name in self.completed:
            self.piece_name[result.name, piece.number] = result.name
            return result
        if not source:
            size_bytes = self.old.storage_bytes[result.storage]
            key = result.storage, piece.number
            if key not in self.storage_of_piece:
                self.storage_of_piece[key] = self.writer.new_storage(size_bytes)
            update = {"name": name, "storage": self.storage_of_piece[key]}
            return result.model_copy(update=update)
        storage = self.writer.storage_of(source)
        _, elements_before = self.begins.get(storage, (0, 0))
        offset = result.tensor.offset - elements_before
        tensor = result.tensor.model_copy(update={"offset": offset})
        return result.model_copy(update={"name": name, "storage": storage, "tensor": tensor})

    def _piece_storage(self, storage: int, piece: _Piece, state: Rows) -> int:
        """Return the storage of a piece of the tensors in `storage`, which are in this state; add
        it at the first call."""
        key = storage, piece.number
        if key not in self.storage_of_piece:
            whole_bytes, rows = self.old.storage_bytes[storage], state.row_count(self.region.rows)
            self.storage_of_piece[key] = self.writer.new_storage(
                -(-whole_bytes * state.in_piece(piece.range).rows // rows)
            )
        return self.storage_of_piece[key]

    def _piece_of_tensor(self, name: str, piece: _Piece, like: Node) -> str:
        """Return the name of a tensor's piece. If the region does not produce the tensor, write the
        views that select the piece, with the module of `like`."""
        key = name, piece.number
        if key in self.piece_name:
            return self.piece_name[key]
        state = self.region.states[name]
        if isinstance(state, OfRow):
            return name
        assert isinstance(state, Rows)
        piece_name = self.writer.append_slice(
            like, name, self.old.tensors[name], state, *state.in_piece(piece.range)
        )
        self.piece_name[key] = piece_name
        return piece_name

    def _with_scaled_argument(self, node: Node, args: Args, index: int, piece: _Piece) -> Args:
        """Write the product of the argument with this index and the piece's share of the rows, and
        return the arguments with it."""
        argument = args[index]
        assert isinstance(argument, Ref)
        name = self.writer.new_name(f"{node.name}_scaled_{piece.number}")
        meta = self.old.tensors[argument.name]
        size_bytes = self.old.storage_bytes[self.old.storage_of[argument.name]]
        result = Result(name=name, tensor=meta, storage=self.writer.new_storage(size_bytes))
        states = (self.region.states.get(name) for name in node.operand_names)
        rows = next(state for state in states if isinstance(state, Rows))
        share = rows.in_piece(piece.range).rows / rows.row_count(self.region.rows)
        self.writer.append(node, "aten.mul.Scalar", (argument, share), result)
        return (*args[:index], Ref(name), *args[index + 1 :])

    # -- wholes -----------------------------------------------------------------------------------

    def _can_add_product(self, node: Node, sums: Sequence[Result], piece: _Piece) -> bool:
        """True if the kernel of a piece's matrix product can add it to the sum: in the backward,
        from the second piece on."""
        is_product = node.target == "aten.mm.default" and bool(sums)
        return is_product and node.backward and not piece.is_first

    def _write_added_product(self, call: Node, result: Result, piece: _Piece) -> None:
        """Write the operation that computes a piece's matrix product and adds it to the sum."""
        whole = self._partial_result(result, piece)
        args: Args = (Ref(self.total[result.name]), *call.args)
        update = {"target": ADD_PRODUCT_TARGET, "args": args, "results": (whole,)}
        self.writer.add(call.model_copy(update={**update, "recomputable": False}))
        self.total[result.name] = whole.name

    def _copy_scalar(self, node: Node, result: Result, piece: _Piece) -> None:
        """Copy a piece's scalar into a storage of its own, so that the large one can be freed."""
        large = self.piece_name[result.name, piece.number]
        name = self.writer.new_name(f"{large}_scalar")
        storage = self.writer.new_storage(self.scalar_bytes[result.storage])
        scalar = Result(name=name, tensor=result.tensor, storage=storage)
        self.writer.append(node, "aten.clone.default", (Ref(large),), scalar)
        self.piece_name[result.name, piece.number] = name

    def _add_summand(self, node: Node, result: Result, piece: _Piece) -> None:
        """Write the operation that adds a piece's summand to the sum: none for the first piece."""
        name = self.piece_name[result.name, piece.number]
        if piece.is_first:
            self.total[result.name] = name
            is_sum = self.region.produced[result.name] == PartialSum()
            if piece.is_last and is_sum:  # no other piece has rows of it
                whole = self._partial_result(result, piece)
                self.writer.append(node, "aten.clone.default", (Ref(name),), whole)
                self.total[result.name] = whole.name
            return
        whole = self._partial_result(result, piece)
        args = (Ref(self.total[result.name]), Ref(name))
        target = ADD_TARGET if node.backward else "aten.add.Tensor"
        self.writer.append(node, target, args, whole)
        self.total[result.name] = whole.name

    def _partial_result(self, result: Result, piece: _Piece) -> Result:
        """Return the tensor that a sum or buffer is after this piece: after the last one `result`
        itself, unless it is still to be divided; else a new one."""
        state = self.region.produced[result.name]
        is_divided = isinstance(state, PartialSum) and state != PartialSum()
        if piece.is_last and not is_divided:
            return result.model_copy(update={"position": -1})
        storage = self.writer.new_storage(self.writer.storage_bytes[result.storage])
        name = self.writer.new_name(f"{result.name}_partial_{piece.number}")
        return Result(name=name, tensor=result.tensor, storage=storage)

    def _divide_sums(self, node: Node, states: Mapping[str, State]) -> None:
        """Write the divisions of a node's sums by their divisors; none for sums without a
        divisor."""
        for result in node.results:
            state = states[result.name]
            if not isinstance(state, PartialSum) or state == PartialSum():
                continue
            target, divisor = "aten.div.Scalar", state.divisor
            argument: Argument = divisor
            if state.divisor_position is not None:
                other = next(r for r in node.results if r.position == state.divisor_position)
                target, argument = "aten.div.Tensor", Ref(other.name)
            args = (Ref(self.total[result.name]), argument)
            whole = result.model_copy(update={"position": -1})
            self.writer.append(node, target, args, whole)

    def _append_piece(self, node: Node, result: Result, state: State, piece: _Piece) -> None:
        """Append a piece to the whole result: write its rows into a buffer in the backward, or if
        the result is not row-major; else concatenate all pieces after the last one."""
        assert isinstance(state, Rows)
        if node.backward or not result.tensor.is_row_major():
            whole = self._partial_result(result, piece)
            before = None if piece.is_first else Ref(self.total[result.name])
            name = self.piece_name[result.name, piece.number]
            start = state.in_piece(piece.range).start
            tensor, place = result.tensor, (state.first, state.count, start * state.block)
            args = (before, Ref(name), tensor.shape, tensor.stride, *place)
            self.writer.append(node, WRITE_ROWS_TARGET, args, whole)
            self.total[result.name] = whole.name
        elif piece.is_last:
            self._concatenate_pieces(node, result, state)

    def _concatenate_pieces(self, node: Node, result: Result, state: Rows) -> None:
        """Write the concatenation of all pieces of a result."""
        keys = ((result.name, p.number) for p in self.pieces)
        parts = tuple(Ref(self.piece_name[key]) for key in keys if key in self.piece_name)
        whole = result.model_copy(update={"position": -1})
        dimension = state.dimensions[-1]
        if state.count == 1:
            self.writer.append(node, "aten.cat.default", (parts, dimension), whole)
            return
        shape = piece_shape(result.tensor.shape, state, state.row_count(self.region.rows))
        stride = [prod(shape[d + 1 :]) for d in range(len(shape))]
        tensor = result.tensor.model_copy(update={"shape": shape, "stride": tuple(stride)})
        flat = Result(
            name=self.writer.new_name(f"{result.name}_rows"), tensor=tensor, storage=result.storage
        )
        self.writer.append(node, "aten.cat.default", (parts, dimension), flat)
        args = (Ref(flat.name), result.tensor.shape)
        self.writer.append(node, "aten.view.default", args, whole, view=True)


def _is_in_piece(state: State, piece: _Piece) -> bool:
    """True if a piece has some of a tensor in this state."""
    if isinstance(state, OfRow):
        return state.row in piece.range
    return not isinstance(state, Rows) or state.in_piece(piece.range).rows > 0


def _bytes_of_large_scalars(region: Region) -> dict[int, int]:
    """Return the bytes of each scalar that the region adds up and whose storage has an element for
    each element of the operand, by storage: torch's mean squared error allocates it. The sum over
    the pieces needs only the bytes of one element."""
    trace, scalars = region.trace, dict[int, int]()
    for index, split in region.split_calls.items():
        node = trace.nodes[index]
        for result, state in zip(node.results, split.results, strict=True):
            size_bytes = trace.storage_bytes[result.storage]
            is_scalar = isinstance(state, PartialSum) and not result.tensor.shape
            if is_scalar and size_bytes > _MAX_SCALAR_BYTES:
                elements = prod(trace.tensors[node.operand_names[0]].shape)
                scalars[result.storage] = size_bytes // elements
    return scalars
