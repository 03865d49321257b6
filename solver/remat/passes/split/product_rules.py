"""Rules of matrix products and of reductions."""

from __future__ import annotations

from math import prod

from remat.passes.split.call import Call, SplitCall, all_results
from remat.passes.split.states import SUM, PartialSum, Rows, Whole


def matrix_product(call: Call, left_index: int = 0) -> SplitCall | None:
    """The rows are those of the left factor, or the columns of the right one, or are summed."""
    match call.state(left_index), call.state(left_index + 1):
        case Rows(0, 1), Whole():
            return all_results(call, Rows(0))
        case Whole(), Rows(1, 1):
            return all_results(call, Rows(1))
        case Rows(1, 1), Rows(0, 1):
            return all_results(call, SUM)
    return None


def product_with_bias(call: Call) -> SplitCall | None:
    """A matrix product added to a bias: for each row, or one for all."""
    bias, product = call.meta(0).shape, matrix_product(call, 1)
    if product is None or product.results != (Rows(0),):
        return None
    is_for_all = len(bias) == 1 or (len(bias) == 2 and bias[0] == 1)
    match call.state(0):
        case Rows(0, 1) if len(bias) == 2 and bias[0] == call.rows:
            return product
        case Whole() if is_for_all:
            return product
    return None


def batched_product(call: Call) -> SplitCall | None:
    """A product for each element of a batch: split along the batch, or as a matrix product."""
    match call.state(0), call.state(1):
        case Rows(0, 1), Rows(0, 1):
            return all_results(call, Rows(0))
        case Rows(1, 1), Whole():
            return all_results(call, Rows(1))
        case Whole(), Rows(2, 1):
            return all_results(call, Rows(2))
        case Rows(2, 1), Rows(1, 1):
            return all_results(call, SUM)
    return None


def reduction(call: Call) -> SplitCall | None:
    """Other dimensions are reduced, or all rows are summed."""
    state, shape = call.state(0), call.meta(0).shape
    if not isinstance(state, Rows):
        return None
    name = call.node.target.split(".")[1]
    is_complete = call.node.target in ("aten.sum.default", "aten.mean.default")
    dimensions = None if is_complete else call.argument(1)
    dimensions = (dimensions,) if isinstance(dimensions, int) else dimensions
    reduced = {d % len(shape) for d in dimensions or range(len(shape))}
    keeps = bool(call.argument(2, False)) and not is_complete
    if reduced.isdisjoint(state.dimensions):
        gone = 0 if keeps else sum(d < state.first for d in reduced)
        return all_results(call, state.shifted(-gone))
    if not reduced.issuperset(state.dimensions) or name not in ("sum", "mean"):
        return None
    if name == "sum":
        return all_results(call, SUM)
    divisor = float(prod(shape[d] for d in reduced))
    target = "aten.sum.default" if is_complete else "aten.sum.dim_IntList"
    return SplitCall((PartialSum(divisor),), target=target)
