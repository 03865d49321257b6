"""Regions of a trace that can be split into pieces: found from one large tensor outwards.

A region has the operations around a tensor that work on its rows independently, and a state for
each tensor that they read or produce. It grows as long as tensors are large: to their producers and
consumers, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, product

from remat.documents.arguments import referenced_names
from remat.documents.records import Node
from remat.documents.targets import ACCUMULATE_TARGET
from remat.documents.trace import Trace
from remat.passes.split.part_rules import (
    CAT,
    DIVISIONS,
    JOINS,
    SELECT_SCATTER,
    SELECTIONS,
    SLICE_BACKWARD,
    SLICE_SCATTER,
)
from remat.passes.split.rules import RESHAPES, split_call
from remat.passes.split.states import (
    WHOLE,
    CallToSplit,
    OfRow,
    PartialSum,
    PieceRange,
    Rows,
    SplitCall,
    State,
    candidate_rows,
    piece_meta,
)

MIN_SHARE = 0.25
"""The smallest tensor that a region grows through, as a share of the tensor that it began with."""

_MAX_COMBINATIONS = 4096
"""The most combinations of states of arguments that are tried for one operation."""


@dataclass(frozen=True)
class Region:
    """Operations that can run on some of the rows at a time.

    It grew from the tensor `seed`, whose dimensions `seed_rows` are `rows` rows. `split_calls` has
    the split call of each operation, by its index in `trace.nodes`, and `states` the states of all
    tensors that they read or produce. A tensor that other operations produce is whole, or by rows:
    then each piece reads a slice.
    """

    trace: Trace
    seed: str
    seed_rows: Rows
    rows: int
    split_calls: Mapping[int, SplitCall]
    states: Mapping[str, State]

    @cached_property
    def produced(self) -> dict[str, State]:
        """The states of the tensors that the region's operations produce."""
        return {
            result.name: state
            for index, item in self.split_calls.items()
            for result, state in zip(self.trace.nodes[index].results, item.results, strict=True)
        }

    def depends_on(self, other: Region) -> bool:
        """True if this region reads or produces a tensor that the other one produces."""
        return not other.produced.keys().isdisjoint(self.states)


def mutated_storages(trace: Trace, node: Node) -> set[int]:
    """Return the storages that a node without results writes into or frees: a buffer, a sum of
    gradients, a gradient that is added into `.grad`. None for a node with results."""
    if node.results or not node.args:
        return set()
    mutated = node.args[1] if node.target == ACCUMULATE_TARGET else node.args[0]
    return {trace.storage_of[name] for name in referenced_names(mutated)}


class TraceIndex:
    """Indices into `trace.nodes`: of operations by name, and of each tensor's producer and
    consumers. `mutated` are the storages that operations modify in place."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nodes_by_name = {node.name: index for index, node in enumerate(trace.nodes)}
        self.producer: dict[str, int] = {}
        self.consumers: dict[str, list[int]] = {}
        for index, (node, operands) in enumerate(zip(trace.nodes, trace.operands, strict=True)):
            for result in node.results:
                self.producer[result.name] = index
            for name in dict.fromkeys(operands):
                self.consumers.setdefault(name, []).append(index)
        self.mutated = {s for node in trace.nodes for s in mutated_storages(trace, node)}


def find_region(
    index: TraceIndex, seed: str, rows: Rows, max_nodes: float = math.inf
) -> Region | None:
    """Return the region around the tensor `seed`, split along these of its dimensions; None if the
    operation that produces it cannot be split so, or if the region has more than `max_nodes`
    operations and views."""
    growth = _RegionGrowth(index, seed, rows, max_nodes)
    if not growth.grow():
        return None
    split_calls = dict(sorted(growth.split_calls.items()))
    return Region(index.trace, seed, rows, growth.rows, split_calls, growth.states)


@dataclass
class _RegionGrowth:
    """A region while it grows from the tensor `seed`, to at most `max_nodes` operations and
    views."""

    index: TraceIndex
    seed: str
    seed_rows: Rows
    max_nodes: float
    split_calls: dict[int, SplitCall] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trace = self.index.trace
        self.metas = self.trace.tensors
        self.producer, self.consumers = self.index.producer, self.index.consumers
        self.produced: set[str] = set()
        shape = self.metas[self.seed].shape
        self.rows = math.prod(shape[dimension] for dimension in self.seed_rows.dimensions)
        self.blocks = {1}
        self.least_elements = MIN_SHARE * self._element_count(self.seed)

    def grow(self) -> bool:
        """Add all operations of the region. Return False if the producer of the seed cannot be
        split, or if there are too many operations."""
        if self.seed not in self.producer:
            return False
        if not self._add_operation(self.producer[self.seed], {self.seed: self.seed_rows}):
            return False
        pending = [self.seed, *self._tensors_read_by(self.producer[self.seed])]
        visited: set[str] = set()
        while pending and len(self.split_calls) <= self.max_nodes:
            name = pending.pop()
            state = self.states.get(name)
            if name in visited or not isinstance(state, Rows | OfRow):
                continue
            visited.add(name)
            tensors = self.rows if isinstance(state, OfRow) else 1
            if tensors * self._element_count(name) <= self.least_elements:
                continue
            for index in (self.producer.get(name), *self.consumers.get(name, ())):
                if (
                    index is not None
                    and index not in self.split_calls
                    and self._add_operation(index, {})
                ):
                    pending.extend(self._tensors_read_by(index))
                    pending.extend(r.name for r in self.trace.nodes[index].results)
        if len(self.split_calls) <= self.max_nodes:
            self._add_bridges()
        return len(self.split_calls) <= self.max_nodes

    def _element_count(self, name: str) -> int:
        """Return the number of elements of a tensor."""
        return math.prod(self.metas[name].shape)

    def _tensors_read_by(self, index: int) -> list[str]:
        """Return the names of the tensors that an operation reads, each once."""
        return list(dict.fromkeys(self.trace.operands[index]))

    def _add_operation(self, index: int, wanted: Mapping[str, State]) -> bool:
        """Add an operation if its rule accepts states of its arguments that agree with the region,
        and gives its results the states `wanted`. Return True if it was added."""
        node = self.trace.nodes[index]
        if node.piece_of:  # pieces are not split further: more pieces would do the same
            return False
        if any(self.trace.storage_of[n] in self.index.mutated for n in self.trace.operands[index]):
            return False
        fixed = {**self.states, **wanted} if wanted else self.states
        for states in islice(self._state_combinations(index, fixed), _MAX_COMBINATIONS):
            split = split_call(CallToSplit(node, self.metas, states, self.rows, fixed))
            if split is None:
                continue
            results = {r.name: s for r, s in zip(node.results, split.results, strict=True)}
            if any(
                name in fixed and _is_state_conflict(fixed[name], s) for name, s in results.items()
            ):
                continue
            if any(not self._has_piece_layout(name, state) for name, state in results.items()):
                continue
            self.split_calls[index] = split
            self.produced.update(results)
            new = {name: s for name, s in states.items() if name not in self.states} | results
            self.states.update(new)
            self.blocks.update(s.block for s in new.values() if isinstance(s, Rows))
            return True
        return False

    def _state_combinations(
        self, index: int, fixed: Mapping[str, State]
    ) -> Iterator[dict[str, State]]:
        """Yield possible states of the tensors that an operation reads. `fixed` has the states of
        tensors that are known, the operation's results among them."""
        node, names = self.trace.nodes[index], self._tensors_read_by(index)
        related = [*(r.name for r in node.results), *names]
        states = [fixed[name] for name in related if name in fixed]
        row = next((state for state in states if isinstance(state, OfRow)), None)
        if node.target in SELECTIONS:  # its operand has all rows
            row = None
        elif node.target == SELECT_SCATTER and node.args[2] == 0:
            row = OfRow(int(node.args[3]) % self.rows)  # type: ignore[arg-type]
        parts = {state.part for state in states if isinstance(state, Rows)}
        parts |= self._parts_of_arguments(node) or ({None} if not parts else set())
        in_order = sorted(parts, key=lambda part: part or (-1, -1))
        blocks = None if node.target in RESHAPES else self.blocks
        choices = [list(self._state_choices(name, blocks, row, in_order)) for name in names]
        for combination in product(*choices):
            yield dict(zip(names, combination, strict=True))
        if node.target in JOINS and len(names) == self.rows:
            in_rows: dict[str, State] = {name: OfRow(n) for n, name in enumerate(names)}
            if all(self.states.get(name, state) == state for name, state in in_rows.items()):
                yield in_rows

    def _parts_of_arguments(self, node: Node) -> set[PieceRange | None]:
        """Return the parts of the rows that the arguments of an operation may have where its result
        has other ones: all that are sliced or divided, some of those that are joined or padded."""
        if node.target in DIVISIONS:
            return {None}
        shape = node.results[0].tensor.shape if node.results else ()
        if not shape or not shape[0] or self.rows % shape[0]:
            return set()
        size, share = shape[0], self.rows // shape[0]
        if node.target in (SLICE_BACKWARD, SLICE_SCATTER) and node.args[2:3] in ((), (0,)):
            start, stop, _ = slice(*node.args[3:5]).indices(size)
            return {PieceRange(start * share, max(0, stop - start) * share), None}
        if node.target == CAT and len(node.args) == 1:
            sizes = [self.metas[name].shape[0] for name in node.operand_names]
            starts = accumulate(sizes, initial=0)
            pairs = zip(starts, sizes, strict=False)
            return {PieceRange(share * start, share * rows) for start, rows in pairs} | {None}
        return set()

    def _state_choices(
        self,
        name: str,
        blocks: Collection[int] | None,
        row: OfRow | None,
        parts: Collection[PieceRange | None],
    ) -> Iterator[State]:
        """Yield the states in which one more operation may read a tensor: its present one (a sum is
        read whole), or, for a tensor new to the region, of the operation's `row` (if it is large),
        whole, and by rows: all, or one of the `parts`. Rows have one of the numbers of elements in
        `blocks`, or any if that is None."""
        if name in self.states and name in self.produced:
            state = self.states[name]
            yield state if isinstance(state, Rows | OfRow) else WHOLE
            return
        if name in self.states:
            yield self.states[name]
            return
        is_large = self.rows * self._element_count(name) > self.least_elements
        if row is not None and is_large and name in self.producer:
            yield row
        yield WHOLE
        shape = self.metas[name].shape
        for rows in (r for part in parts for r in candidate_rows(shape, self.rows, blocks, part)):
            if self._has_piece_layout(name, rows, is_slice=True):
                yield rows

    def _has_piece_layout(self, name: str, state: State, *, is_slice: bool = False) -> bool:
        """True if pieces of a tensor in this state have strides: as tensors of their own, or with
        `is_slice` as slices of the whole tensor."""
        if not isinstance(state, Rows):
            return True
        return piece_meta(self.metas[name], state, 1, is_slice=is_slice) is not None

    def _add_bridges(self) -> None:
        """Add operations on small tensors between two operations of the region, such as on the
        maximum of each row: outside of it they would wait for all pieces of the large tensors."""
        added = True
        while added:
            added = False
            readers = [
                index
                for name, state in self.states.items()
                if isinstance(state, Rows) and name in self.produced
                for index in self.consumers.get(name, ())
                if index not in self.split_calls
            ]
            leading = self._ancestors_of_region(False, readers)
            leading |= self._ancestors_of_region(True, readers)
            for index in readers:
                if index in leading and index not in self.split_calls:
                    added |= self._add_operation(index, {})

    def _ancestors_of_region(self, backward: bool, readers: Sequence[int]) -> set[int]:
        """Return the operations of the forward, or with `backward` of the backward, on which a
        later operation of the region in the same one depends, from the first of `readers` on."""
        nodes, ancestors = self.trace.nodes, set[int]()
        first = min((i for i in readers if nodes[i].backward == backward), default=len(nodes))
        last = max((i for i in self.split_calls if nodes[i].backward == backward), default=0)
        for index in reversed(range(first, last)):
            if nodes[index].backward == backward and any(
                nodes[c].backward == backward and (c in self.split_calls or c in ancestors)
                for result in nodes[index].results
                for c in self.consumers.get(result.name, ())
            ):
                ancestors.add(index)
        return ancestors


def _is_state_conflict(state: State, result: State) -> bool:
    """True if a tensor that the region reads in `state` cannot be produced in the state `result`. A
    sum is whole once it is complete, so it can be read whole."""
    return state != result and not (state == WHOLE and isinstance(result, PartialSum))
