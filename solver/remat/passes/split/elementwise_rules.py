"""Rules of operators that work element by element, or along one dimension."""

from __future__ import annotations

from math import prod

from remat.passes.split.call import Call, Rule, SplitCall, all_results
from remat.passes.split.states import WHOLE, PartialSum, Rows, Whole


def elementwise(call: Call) -> SplitCall | None:
    """Each element of the results depends on the elements in its place, after broadcasting."""
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
    if split is None or prod(shape[d] for d in split.dimensions) != call.rows:
        return None
    for name in call.tensors:
        sizes, state = call.metas[name].shape, call.states.get(name, WHOLE)
        missing = len(shape) - len(sizes)
        row_sizes = [sizes[d - missing] for d in split.dimensions if d >= missing]
        if isinstance(state, PartialSum) or (isinstance(state, Whole) and prod(row_sizes) != 1):
            return None
    return all_results(call, split)


def along_one_dimension(index: int) -> Rule:
    """Return the rule of an operator that mixes elements along the dimension in its argument
    `index`: that must not be one of the rows."""

    def rule(call: Call) -> SplitCall | None:
        dimension, first = call.argument(index, -1), call.state(0)
        if not isinstance(dimension, int) or not isinstance(first, Rows):
            return None
        if any(call.states.get(name, WHOLE) != first for name in call.tensors):
            return None
        dimension %= len(call.meta(0).shape)
        return None if dimension in first.dimensions else all_results(call, first)

    return rule
