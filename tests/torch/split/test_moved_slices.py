"""Shifted logits: their slice moves to the input of the head, which is then split with the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.compiled_steps import assert_same as assert_same_compiled
from tests.helpers.training.compiled_steps import step
from tests.helpers.training.models import Case
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from torch import nn

import remat
from remat.limits.units import format_bytes
from remat.passes.split.moved_slices import MOVED_SUFFIX, with_moved_slices
from remat.passes.split.splits import split_largest_operations, with_recorded_splits

COSTS = remat.Roofline("cpu")
WORDS = 500


def shifted(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def as_in_transformers(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In float32, with copies, as models computed their loss for years."""
    logits = logits.float()[..., :-1, :].contiguous().view(-1, WORDS)
    return F.cross_entropy(logits, ids[..., 1:].contiguous().view(-1))


def of_padded_words(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The head has more words than there are."""
    return F.cross_entropy(logits[..., : WORDS - 4].flatten(0, 1), ids.flatten() % (WORDS - 4))


def without_a_prefix(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten(), ignore_index=5)


class LanguageModel(nn.Module):
    """An embedding, a layer, and a head, with a loss that slices the logits."""

    def __init__(
        self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bias: bool = False
    ) -> None:
        super().__init__()
        self.loss = loss
        self.embed, self.layer = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS, bias=bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.layer(self.embed(ids)).relu()), ids)


def case_of(model: nn.Module, batch: int = 4) -> Case:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (batch, 33), generator=generator)
    return Case(model, (ids,), loss=lambda loss: loss)


@pytest.mark.parametrize(
    ("loss", "bias", "batch", "dtype"),
    [
        (shifted, False, 4, torch.float32),
        (shifted, True, 1, torch.float32),
        (as_in_transformers, False, 4, torch.bfloat16),
        (without_a_prefix, True, 4, torch.float32),
        (of_padded_words, False, 4, torch.float32),
    ],
)
def test_a_head_with_sliced_logits_is_split(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    bias: bool,
    batch: int,
    dtype: torch.dtype,
) -> None:
    """The loss and gradients are eager mode's, and the peak is the predicted one."""
    torch.manual_seed(0)
    case = case_of(LanguageModel(loss, bias).to(dtype), batch)
    eager = eager_step(case)
    planned = remat.optimize(case.model, "80%", case.args, costs=COSTS, split=4)
    actual = run_step(planned, case)
    assert_same(actual, eager, tolerance=1e-6 if dtype == torch.float32 else 1e-2)
    assert planned.plan is not None
    (split,) = planned.plan.graph.splits
    assert split.pieces == 4
    assert split.module == "head"
    assert actual.peak_bytes == planned.plan.peak_bytes
    assert actual.peak_bytes <= 0.8 * planned.plan.baseline_peak_bytes
    largest_bytes = max(value.size_bytes for value in planned.plan.graph.values)
    assert largest_bytes < split.rows * WORDS * dtype.itemsize


def transposed(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), ids)


def rolled(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`roll` has no rule."""
    return F.cross_entropy(logits.flatten(0, 1).roll(1, 0), ids.flatten())


@pytest.mark.parametrize(
    ("loss", "batch", "reason"),
    [
        (rolled, 4, "because no rule splits aten.roll"),
        (transposed, 1, "because an operation needs its rows together"),
    ],
)
def test_what_stays_whole_is_named_with_the_operator_without_a_rule(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], batch: int, reason: str
) -> None:
    """In the error, and in the explanation of a plan."""
    case = case_of(LanguageModel(loss), batch)
    size_bytes = 4 * batch * 33 * WORDS
    whole = f"{format_bytes(size_bytes)} of .* exist as a whole, {reason}"
    with pytest.raises(remat.InfeasibleBudget, match=whole):
        remat.optimize(case.model, "60%", case.args, costs=COSTS)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12))
    case.model.layer = nn.Sequential(*layers)  # something to recompute
    planned = remat.optimize(case.model, "92%", case.args, costs=COSTS, split=2)
    assert planned.plan is not None
    assert reason in planned.plan.describe()


@pytest.mark.slow
def test_under_torch_compile_logits_are_sliced_or_reported() -> None:
    torch._dynamo.reset()
    case = case_of(LanguageModel(shifted))
    expected = step(case, case.model)
    compiled = remat.compile(case.model, "80%", inductor=False, split=4)
    assert_same_compiled([step(case, compiled)], [expected], tolerance=1e-5)
    assert remat.compiled_plans()[-1].plan.graph.splits[0].module == "head"
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no rule splits aten"):
        remat.compile(LanguageModel(rolled), "20%", inductor=False, split=4)(*case.args)


def test_splits_are_repeated_on_another_trace() -> None:
    """The slice moves there, too."""
    case = case_of(LanguageModel(shifted))
    trace = remat.trace(case.model, case.args)
    split = split_largest_operations(trace, 4)
    assert any(MOVED_SUFFIX in node.name for node in split.nodes)
    assert with_recorded_splits(trace, split.splits).nodes == split.nodes
    assert with_moved_slices(split) is split


class Returned(LanguageModel):
    """A model whose caller gets the logits as well."""

    def forward(self, ids: torch.Tensor) -> Any:
        logits = self.head(self.layer(self.embed(ids)).relu())
        return self.loss(logits, ids), logits


class Capped(LanguageModel):
    """A model whose logits have other readers than the slice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.embed(ids)).relu())
        return self.loss(logits, ids) + 1e-3 * logits.square().mean()


@pytest.mark.parametrize("model", [Returned, Capped])
def test_logits_that_are_read_as_a_whole_stay(model: type[LanguageModel]) -> None:
    case = case_of(model(shifted))
    trace = remat.trace(case.model, case.args)
    assert with_moved_slices(trace) is trace


class AddedToEachRow(nn.Module):
    """A head whose product has an addend for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.weight = nn.Parameter(torch.randn(WORDS, 16))
        self.register_buffer("addend", torch.randn(4 * 33, WORDS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embed(ids).flatten(0, 1)
        addend = self.get_buffer("addend")
        logits = torch.addmm(addend, rows, self.weight.t()).view(*ids.shape, WORDS)
        return shifted(logits, ids)


def test_a_slice_stays_behind_a_product_with_an_addend_for_each_row() -> None:
    torch.manual_seed(0)
    case = Case(AddedToEachRow(), (torch.randint(0, WORDS, (4, 33)),), loss=lambda loss: loss)
    eager = eager_step(case)
    model = remat.optimize(case.model, "100%", case.args, costs=COSTS, split=4)
    assert_same(run_step(model, case), eager, tolerance=1e-5)
