"""Rules of norms, losses and embeddings."""

from __future__ import annotations

from math import prod

from remat.passes.split.call import Call, Rule, SplitCall, all_results, replaced
from remat.passes.split.elementwise_rules import elementwise
from remat.passes.split.states import SUM, WHOLE, PartialSum, Rows, Whole

MEAN_REDUCTION, SUM_REDUCTION = 1, 2
"""Values of the argument `reduction` of torch's losses."""


def normalization(call: Call) -> SplitCall | None:
    """A norm over the last dimensions. Its results are by rows: outputs and statistics."""
    state, normalized = call.state(0), len(call.argument(1))
    if not isinstance(state, Rows) or any(
        call.states.get(name, WHOLE) != WHOLE for name in call.tensors[1:]
    ):
        return None
    is_outside = state.first + state.count <= len(call.meta(0).shape) - normalized
    return all_results(call, state) if is_outside else None


def normalization_backward(statistics: tuple[int, ...]) -> Rule:
    """Return the rule of a norm's backward: the gradient of its input is by rows, those of weight
    and bias are sums. `statistics` are the arguments that its forward returned."""

    def rule(call: Call) -> SplitCall | None:
        state, normalized = call.state(0), len(call.argument(2))
        by_rows = (0, 1, *statistics)
        others = set(call.tensors) - {call.name(index) for index in by_rows}
        if (
            not isinstance(state, Rows)
            or any(call.state(index) != state for index in by_rows)
            or any(call.states.get(name, WHOLE) != WHOLE for name in others)
            or state.first + state.count > len(call.meta(0).shape) - normalized
        ):
            return None
        return SplitCall(tuple(state if r.position == 0 else SUM for r in call.node.results))

    return rule


def negative_log_likelihood(call: Call) -> SplitCall | None:
    """The mean is the sum divided by the sum of the weights of targets that are not ignored."""
    kind = call.argument(3)
    if (call.state(0), call.state(1), call.state(2)) != (Rows(0), Rows(0), WHOLE):
        return None
    if kind not in (MEAN_REDUCTION, SUM_REDUCTION):
        return None
    loss = PartialSum(divisor_position=1) if kind == MEAN_REDUCTION else SUM
    if kind == MEAN_REDUCTION and {r.position for r in call.node.results} != {0, 1}:
        return None
    results = tuple(loss if r.position == 0 else SUM for r in call.node.results)
    return SplitCall(results, lambda rows: replaced(call, 3, SUM_REDUCTION))


def negative_log_likelihood_backward(call: Call) -> SplitCall | None:
    """The sum of weights is that of all rows."""
    states = tuple(call.state(index) for index in (0, 1, 2, 3, 6))
    is_reduced = call.argument(4) in (MEAN_REDUCTION, SUM_REDUCTION)
    expected = (WHOLE if is_reduced else Rows(0), Rows(0), Rows(0), WHOLE, WHOLE)
    return all_results(call, Rows(0)) if states == expected else None


def elementwise_loss(index: int) -> Rule:
    """Return the rule of a loss between two tensors of one shape; `index` is that of the argument
    `reduction`."""

    def rule(call: Call) -> SplitCall | None:
        kind, state = call.argument(index, MEAN_REDUCTION), call.state(0)
        if kind not in (MEAN_REDUCTION, SUM_REDUCTION):
            return elementwise(call)
        if not isinstance(state, Rows) or call.state(1) != state:
            return None
        if call.meta(0).shape != call.meta(1).shape or call.name(2):  # a weight may be broadcast
            return None
        divisor = float(prod(call.meta(0).shape)) if kind == MEAN_REDUCTION else 1.0
        padded = (*call.node.args, *(None,) * (index - len(call.node.args)))
        arguments = (*padded[:index], SUM_REDUCTION, *call.node.args[index + 1 :])
        return SplitCall((PartialSum(divisor),), lambda rows: arguments)

    return rule


def elementwise_loss_backward(index: int) -> Rule:
    """Return the rule of such a loss's backward. Its mean is over the elements of a piece, so the
    gradient of the loss is multiplied by the piece's share."""

    def rule(call: Call) -> SplitCall | None:
        kind, state = call.argument(index, MEAN_REDUCTION), call.state(1)
        if kind not in (MEAN_REDUCTION, SUM_REDUCTION):
            return elementwise(call)
        if not isinstance(state, Rows) or call.state(2) != state or call.state(0) != WHOLE:
            return None
        if call.meta(1).shape != call.meta(2).shape or call.meta(0).shape or call.name(3):
            return None
        return SplitCall((state,), scaled=0 if kind == MEAN_REDUCTION else None)

    return rule


def embedding(call: Call) -> SplitCall | None:
    """A row of the weight for each index."""
    match call.state(0), call.state(1):
        case Whole(), Rows() as state:
            return all_results(call, state)
    return None


def embedding_backward(call: Call) -> SplitCall | None:
    """A sum over the rows."""
    state, is_scaled_by_frequency = call.state(0), call.argument(4, False)
    is_split = isinstance(state, Rows) and call.state(1) == state and not is_scaled_by_frequency
    return all_results(call, SUM) if is_split else None
