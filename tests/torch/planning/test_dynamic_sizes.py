"""Calls of different sizes: two captures for any number of them, and never over the budget."""

from __future__ import annotations

import copy
import math
import pickle
import random
from typing import Any

import pytest
import torch
from tests.helpers.training.models import FAMILIES, Case, Mlp, WithParts, gpt2
from tests.helpers.training.recorded_steps import Step, assert_same, run_step
from torch import nn

import remat
from remat.frontend.capture.symbolic_capture import capture_symbolically
from remat.frontend.common.pytree import flatten
from remat.frontend.planning.planner import Planner
from remat.passes.trace_equality import is_same_except_names, topology_key

OPTIONS: dict[str, Any] = {
    "costs": remat.Roofline("cpu"),
    "strategy": remat.Auto(gap=0.05, time_limit=1.0),
    "split": "off",  # pieces add in another order: gradients are not equal bit for bit
}
LENGTHS = (24, 64, 16, 40, 33, 48, 57, 20, 61, 29)


def planner_of(model: nn.Module) -> Planner:
    planner = model.__dict__["_remat_forward"].planner
    assert isinstance(planner, Planner)
    return planner


def plan_of(model: nn.Module) -> remat.Plan:
    plan = remat.plans(model)[-1]
    assert isinstance(plan, remat.Plan)
    return plan


def enabled_gpt2(budget: int | str, **options: Any) -> Case:
    torch.manual_seed(0)
    case = gpt2(layers=1, dropout=0.0)
    remat.enable(case.model, budget, **OPTIONS, **options)
    return case


def shortened(case: Case, length: int, rows: int = 4) -> Case:
    """Return the same model with fewer rows and shorter texts."""
    kwargs = {k: v[:rows, :length].clone() for k, v in case.kwargs.items()}
    return Case(case.model, kwargs=kwargs)


def eager_step_of(case: Case) -> Step:
    """Run the step on a copy in eager mode."""
    copied = copy.deepcopy(case)
    remat.disable(copied.model)
    return run_step(copied.model, copied)


def assert_trains_as_eager(case: Case, length: int | None = None) -> remat.Plan:
    """Check a step bit for bit, and that its peak is the plan's and within the budget. With a
    `length`, the texts of the case are shortened."""
    case = case if length is None else shortened(case, length)
    step = run_step(case.model, case)
    assert_same(step, eager_step_of(case), tolerance=0.0)
    plan = plan_of(case.model)
    assert step.peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    return plan


@pytest.mark.slow
def test_ten_lengths_need_two_captures() -> None:
    """In twenty batches."""
    torch.manual_seed(0)
    case = gpt2()
    largest = remat.optimize(copy.deepcopy(case.model), "60%", (), case.kwargs, **OPTIONS).plan
    assert largest is not None
    remat.enable(case.model, "60%", **OPTIONS)
    for _ in range(2):
        for length in LENGTHS:
            plan = assert_trains_as_eager(case, length)
            assert plan.peak_bytes <= largest.budget_bytes
    assert planner_of(case.model).trace_cache.capture_count == 2
    assert len(remat.plans(case.model)) == len(LENGTHS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert", "t5")]
)
def test_a_symbolic_capture_at_any_size_equals_a_capture_of_that_size(name: str) -> None:
    """Rows and lengths vary; every argument, stride and storage size is compared."""
    torch.manual_seed(0)
    case = FAMILIES[name]()
    leaves, inputs = flatten(((), shortened(case, 40, rows=3).kwargs), "")
    varying = {(n, d) for n in range(len(leaves)) for d in (0, 1)}
    symbolic = capture_symbolically(case.model, leaves, inputs, "auto", varying)
    captured_key = topology_key(remat.trace(case.model, (), shortened(case, 50, rows=2).kwargs))
    for rows, length in ((4, 64), (3, 33)):
        small_case = shortened(case, length, rows)
        shapes = [tuple(t.shape) for t in small_case.kwargs.values()]
        trace = symbolic.trace_at(shapes)
        assert trace is not None
        assert is_same_except_names(trace, remat.trace(case.model, (), small_case.kwargs))
        assert topology_key(trace) == captured_key
    other = remat.trace(case.model, (), shortened(case, 33, rows=2).kwargs)
    assert not is_same_except_names(trace, other)


@pytest.mark.slow
def test_gradient_accumulation_needs_no_other_capture() -> None:
    case = gpt2(layers=1)
    remat.enable(case.model, "70%", **OPTIONS)
    for length in (32, 48, 24):
        one = shortened(case, length)
        copied = copy.deepcopy(one)
        remat.disable(copied.model)
        for zero_grad in (True, False):
            actual = run_step(one.model, one, zero_grad=zero_grad)
            assert_same(actual, run_step(copied.model, copied, zero_grad=zero_grad), tolerance=0.0)
    assert planner_of(case.model).trace_cache.capture_count == 2


class Branching(WithParts, short=(8, 8), long=(8, 8)):
    """A model that branches for long inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.long if x.shape[0] > 20 else self.short
        return torch.tanh(layer(x)).square().sum()


class Padding(WithParts, layer=(8, 8)):
    """A model that pads to a multiple of eight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 8))
        return self.layer(x).view(-1, 8, 8).square().mean()


class ByItsSize(nn.Module):
    """A model with Python numbers computed from a size, by code that cannot handle symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table = {n: 1.0 / n for n in range(1, 100)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.table[x.shape[0]] * math.log(x.shape[0])
        return torch.tanh(self.layer(x) * scale).sum()


class Constants(WithParts, layer=(8, 8)):
    """A model that branches on a value computed from a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(100)[: x.shape[0]]
        if bool(places.sum() % 2 == 0):
            return torch.tanh(self.layer(x)).sum()
        return torch.sigmoid(self.layer(x)).sum()


class Remembering(nn.Module):
    """A model that stores values computed from sizes in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.rows, self.most, self.seen = 0, 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows, self.seen = x.shape[0], [x.shape[0]]
        self.most = max(self.most, x.shape[0])
        return torch.tanh(self.layer(x)).sum() * self.most


def test_attributes_that_a_forward_sets_have_the_current_sizes() -> None:
    torch.manual_seed(0)
    model = Remembering()
    remat.enable(model, "100%", **OPTIONS)
    for rows in (8, 12, 16, 20, 25):  # each is new: a planned step does not run the model
        assert_trains_as_eager(Case(model, (torch.randn(rows, 8),), loss=lambda out: out))
        assert (type(model.rows), model.rows, model.most, model.seen) == (int, rows, rows, [rows])
    pickle.dumps(model)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Branching, Padding, ByItsSize, Constants])
def test_a_model_that_branches_on_a_size_is_captured_per_size(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    remat.enable(model, "100%", **OPTIONS)
    for rows in (16, 13, 18, 24, 17, 31, 19, 40, 16, 23, 8, 2, 1, 3):
        assert_trains_as_eager(Case(model, (torch.randn(rows, 8),), loss=lambda out: out))


def test_sizes_that_are_equal_by_chance_may_differ_later() -> None:
    """Two inputs have the same number of rows at first, then not."""

    class Two(WithParts, layer=(8, 8)):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean() + torch.tanh(self.layer(y)).sum()

    model = Two()
    remat.enable(model, "100%", **OPTIONS)
    for rows, others in ((8, 8), (12, 12), (12, 20), (9, 9), (30, 7)):
        arguments = torch.randn(rows, 8), torch.randn(others, 8)
        assert_trains_as_eager(Case(model, arguments, loss=lambda out: out))


@pytest.mark.slow
def test_strided_inputs_are_captured_symbolically() -> None:
    torch.manual_seed(0)
    model = Mlp(dropout=0.0)
    remat.enable(model, "100%", **OPTIONS)
    for rows in (16, 24, 40, 16):
        for x in (torch.randn(rows, 32), torch.randn(32, rows).t(), torch.randn(2 * rows, 32)[::2]):
            case = Case(model, (x,), loss=lambda out: out["loss"])
            assert_same(run_step(model, case), eager_step_of(case), tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["80%", "min"])
def test_smaller_sizes_may_use_the_budget_of_the_largest(budget: str) -> None:
    """A percentage, and "min", are relative to the largest step so far."""
    case = enabled_gpt2(budget)
    longest, shorter, shortest = (assert_trains_as_eager(case, n) for n in (64, 56, 8))
    assert shorter.budget_bytes == longest.budget_bytes
    assert shortest.overhead == 0
    assert "none" in str(shortest.stats["strategy"])


@pytest.mark.slow
def test_steps_planned_before_the_largest_are_replanned_after_it() -> None:
    case = enabled_gpt2("80%")
    first, longest, replanned = (assert_trains_as_eager(case, n) for n in (32, 64, 32))
    assert first.overhead > replanned.overhead == 0
    assert replanned.budget_bytes == longest.budget_bytes
    assert len(remat.plans(case.model)) == 2


@pytest.mark.slow
def test_the_limit_is_on_programs_not_on_lengths(caplog: pytest.LogCaptureFixture) -> None:
    case = enabled_gpt2(10**9, max_plans=2)
    random_lengths = random.Random(0).sample(range(2, 64), 20)
    for length in (64, *random_lengths, 64, *random_lengths):
        run_step(case.model, shortened(case, length))
    assert "dropping the least recently used plan" not in caplog.text
    assert len(remat.plans(case.model)) == 21
    assert planner_of(case.model).trace_cache.capture_count == 2


@pytest.mark.slow
def test_a_size_that_does_not_fit_raises_before_it_runs() -> None:
    case = gpt2(layers=1, dropout=0.0)
    smallest = remat.optimize(
        copy.deepcopy(case.model), "min", (), shortened(case, 32).kwargs, **OPTIONS
    ).plan
    assert smallest is not None
    remat.enable(case.model, smallest.peak_bytes * 5 // 4, **OPTIONS)
    assert_trains_as_eager(case, 32)
    assert_trains_as_eager(case, 24)
    with pytest.raises(remat.InfeasibleBudget):
        run_step(case.model, case)
    assert_trains_as_eager(case, 28)


@pytest.mark.slow
def test_copies_keep_their_captures() -> None:
    torch.manual_seed(0)
    case = gpt2(layers=1)
    remat.enable(case.model, "70%", **OPTIONS)
    for length in (32, 48):
        run_step(case.model, shortened(case, length))
    for model in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
        twin = Case(model, kwargs=case.kwargs)
        for length in (32, 48, 24, 40):
            assert_trains_as_eager(twin, length)
        assert planner_of(model).trace_cache.capture_count <= 2
