"""Rules of operators that change the shape of a tensor, or select and join parts of it."""

from __future__ import annotations

from math import prod

from remat.passes.split.call import Call, SplitCall, all_results, replaced
from remat.passes.split.states import Rows, candidate_rows, piece_shape

_MAX_INDEX = 2**63 - 1
"""The end of a slice up to the last element."""


def reshape(call: Call) -> SplitCall | None:
    """The rows must be a product of dimensions before and after."""
    state, shape, result = call.state(0), call.meta(0).shape, call.node.results[0].tensor.shape
    if not isinstance(state, Rows):
        return None
    before = prod(shape[: state.first])
    candidates = candidate_rows(result, call.rows)
    moved = next((c for c in candidates if prod(result[: c.first]) == before), None)
    if moved is None:
        return None
    return SplitCall((moved,), lambda rows: replaced(call, 1, piece_shape(result, moved, rows)))


def expand(call: Call) -> SplitCall | None:
    """Other dimensions than the rows are expanded."""
    state, shape, result = call.state(0), call.meta(0).shape, call.node.results[0].tensor.shape
    if not isinstance(state, Rows):
        return None
    moved = state.shifted(len(result) - len(shape))
    if prod(result[d] for d in moved.dimensions) != call.rows:
        return None
    return SplitCall((moved,), lambda rows: replaced(call, 1, piece_shape(result, moved, rows)))


def permute(call: Call) -> SplitCall | None:
    """The dimensions of the rows must stay neighbours, in their order."""
    state, dimensions = call.state(0), len(call.meta(0).shape)
    if not isinstance(state, Rows):
        return None
    order = _order_of_dimensions(call, dimensions)
    places = [order.index(d) for d in state.dimensions]
    if places != list(range(places[0], places[0] + state.count)):
        return None
    return all_results(call, Rows(places[0], state.count))


def _order_of_dimensions(call: Call, dimensions: int) -> list[int]:
    """Return the argument's dimension for each one of the result."""
    order = list(range(dimensions))
    if call.node.target == "aten.permute.default":
        return [d % dimensions for d in call.argument(1)]
    one, other = call.argument(1, 0) % max(dimensions, 1), call.argument(2, 1) % max(dimensions, 1)
    if dimensions > 1:
        order[one], order[other] = order[other], order[one]
    return order


def unsqueeze(call: Call) -> SplitCall | None:
    """A dimension is added outside of the rows."""
    state, dimensions = call.state(0), len(call.meta(0).shape) + 1
    if not isinstance(state, Rows):
        return None
    added = call.argument(1) % dimensions
    if state.first < added < state.first + state.count:
        return None
    return all_results(call, state.shifted(added <= state.first))


def squeeze(call: Call) -> SplitCall | None:
    """Dimensions of size 1 outside of the rows are removed."""
    state, shape = call.state(0), call.meta(0).shape
    if not isinstance(state, Rows):
        return None
    argument = call.argument(1)
    dimensions = {d % len(shape) for d in ((argument,) if isinstance(argument, int) else argument)}
    if not dimensions.isdisjoint(state.dimensions):
        return None  # a piece of one row would lose the dimension
    removed = {d for d in dimensions if shape[d] == 1}
    return all_results(call, state.shifted(-sum(d < state.first for d in removed)))


def selection(call: Call) -> SplitCall | None:
    """A part of a dimension that is not one of the rows, or all of them."""
    state, shape = call.state(0), call.meta(0).shape
    if not isinstance(state, Rows):
        return None
    dimension = call.argument(1, 0) % len(shape)
    if call.node.target == "aten.select.int":
        if dimension in state.dimensions:
            return None
        return all_results(call, state.shifted(-(dimension < state.first)))
    if dimension not in state.dimensions:
        return all_results(call, state)
    if call.node.results[0].tensor.shape != shape:
        return None
    return SplitCall((state,), lambda rows: (call.node.args[0], dimension, 0, _MAX_INDEX))


def selection_backward(call: Call) -> SplitCall | None:
    """The gradient of a part of a dimension that is not one of the rows: zeros around it."""
    state, shape = call.state(0), call.node.results[0].tensor.shape
    if not isinstance(state, Rows) or call.argument(2) % len(shape) in state.dimensions:
        return None
    return SplitCall((state,), lambda rows: replaced(call, 1, piece_shape(shape, state, rows)))


def parts(call: Call) -> SplitCall | None:
    """Several results, which are parts of a dimension that is not one of the rows."""
    state, shape = call.state(0), call.meta(0).shape
    if not isinstance(state, Rows):
        return None
    is_row = call.argument(2, 0) % len(shape) in state.dimensions
    return None if is_row else all_results(call, state)


def concatenation(call: Call) -> SplitCall | None:
    """All parts have the same rows, along another dimension."""
    states = set(call.all_states)
    state = states.pop()
    if states or not isinstance(state, Rows):
        return None
    dimension = call.argument(1, 0) % len(call.node.results[0].tensor.shape)
    return None if dimension in state.dimensions else all_results(call, state)
