"""Blocks may take and return dataclasses."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.block_models import (
    Block,
    Experts,
    Net,
    Output,
    enabled,
    peak_of,
    plan_of,
)
from tests.helpers.training.steps import assert_same_steps
from torch import nn

from remat.frontend.common.pytree import flatten_objects, tensors_in, unflatten_objects


@dataclass(frozen=True)
class State:
    """A dataclass between blocks: frozen, with an optional field and a number."""

    hidden: torch.Tensor
    scores: torch.Tensor | None = None
    depth: int = 0


class Passed(nn.Module):
    """A block that takes a dataclass and returns one. `is_seen` is whether captures can trace
    it."""

    def __init__(self, is_seen: bool) -> None:
        super().__init__()
        self.is_seen = is_seen
        self.before, self.experts = Block(32), Experts(32)

    def forward(self, state: State) -> State:
        x = self.before(state.hidden)
        if self.is_seen:
            return State(x + F.silu(x), depth=state.depth + 1)
        to = x.detach().abs().sum(-1).long() % 3
        return State(x + self.experts(x, to), to.float(), state.depth + 1)


class Stated(Net):
    def forward(self, ids: torch.Tensor) -> Output:
        state = State(self.embed(ids) * self.scale)
        for block in self.blocks:
            state = block(state)
        assert state.depth == len(self.blocks)
        logits = self.head(state.hidden)
        return Output(F.cross_entropy(logits, ids), logits)


@pytest.mark.parametrize("is_seen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_may_exchange_dataclasses(is_seen: bool) -> None:
    torch.manual_seed(0)
    model, ids = Stated([Passed(is_seen) for _ in range(3)]), torch.randint(0, 50, (256,))
    for block in model.blocks:
        if is_seen:
            block.experts = nn.Identity()  # which would get no gradients
    eager = copy.deepcopy(model)
    enabled(model, "min")
    assert_same_steps(model, eager, ids, seeds=(1, 2))
    plan = plan_of(model)
    assert plan.peak_bytes < 0.9 * plan.baseline_peak_bytes
    assert peak_of(model, ids) <= plan.peak_bytes + 64


def test_tensors_in_nested_structures_are_flattened_and_restored() -> None:
    first, second = torch.zeros(1), torch.zeros(2)
    tree = {"a": State(first, None, 3), "b": [(second, "text"), State(second, first)], "c": {1, 2}}
    leaves, shape = flatten_objects(tree)
    assert [id(leaf) for leaf in tensors_in(tree)] == [
        id(tensor) for tensor in (first, second, second, first)
    ]
    back = unflatten_objects(leaves, shape)
    assert (back["a"].hidden, back["a"].scores, back["a"].depth) == (first, None, 3)
    assert back["b"][0][0] is second
    assert back["b"][1].scores is first
    assert back["c"] == {1, 2}
    assert flatten_objects(back)[1] == shape != flatten_objects({"a": State(first)})[1]


def test_a_dataclass_that_contains_itself_is_flattened() -> None:
    @dataclass
    class Linked:
        item: torch.Tensor
        other: object = None

    one = Linked(torch.zeros(1))
    one.other = [one]
    assert len(tensors_in(one)) == 1
    assert flatten_objects(one)[0][1] is one
