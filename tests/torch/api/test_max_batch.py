"""`remat.max_batch` returns the batch that exhaustive search finds, and a step of it runs within
the budget."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.helpers.training.models import Case, Mlp
from tests.helpers.training.recorded_steps import run_step
from torch import nn

import remat
from remat.batch import BatchAttempt, MaxBatch
from remat.strategies import KeepAll, PerBlock, Strategy

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=10.0)
MODEL = Mlp(width=64, depth=2)
BUDGET = 200_000
MOST = 9
"""One more than fits `BUDGET`, and one more than that."""


def _mlp(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return MODEL, (torch.zeros(16 * batch, 64),)


@cache
def _trace(batch: int) -> remat.Trace:
    return remat.measure(remat.trace(*_mlp(batch)), COSTS)


@cache
def _largest_batch() -> MaxBatch:
    return remat.max_batch(_mlp, BUDGET, costs=COSTS, strategy=STRATEGY)


def _batches_with_a_plan(
    budget: int, most: int, strategy: Strategy = STRATEGY, max_overhead: float = 1e9
) -> list[int]:
    """Return the batches with a plan, by trying all of them."""
    fitting_batches: list[int] = []
    for batch in range(1, most + 1):
        try:
            plan = remat.solve(_trace(batch), budget, strategy)
        except remat.InfeasibleBudget:
            continue
        if plan.overhead <= max_overhead:
            fitting_batches.append(batch)
    return fitting_batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "most"), [(120_000, 6), pytest.param(BUDGET, MOST, marks=pytest.mark.slow)]
)
def test_the_largest_batch_is_the_one_that_exhaustive_search_finds(budget: int, most: int) -> None:
    fitting, eager = (
        _batches_with_a_plan(budget, most),
        _batches_with_a_plan(budget, most, KeepAll()),
    )
    assert fitting == list(range(1, len(fitting) + 1))
    reports: list[BatchAttempt] = []
    largest = remat.max_batch(_mlp, budget, costs=COSTS, strategy=STRATEGY, progress=reports.append)
    assert largest.batch == fitting[-1] < most
    assert largest.eager_batch == eager[-1] < largest.batch
    assert largest.is_proved
    assert largest.budget_bytes == budget >= largest.plan.peak_bytes
    assert largest.trace == _trace(largest.batch)
    assert tuple(reports) == largest.attempts
    assert len(reports) <= 6
    neighbour = next(a for a in reports if a.batch == largest.batch + 1)
    assert not neighbour.fits
    assert neighbour.min_peak_bytes is not None
    assert neighbour.min_peak_bytes > budget
    for words in (f"batch     {largest.batch},", "proved", "a sample", "does not fit, proved"):
        assert words in largest.describe()


@pytest.mark.slow
def test_max_overhead_limits_the_batch() -> None:
    largest = remat.max_batch(_mlp, BUDGET, costs=COSTS, strategy=STRATEGY, max_overhead=0.2)
    assert (
        largest.batch
        == _batches_with_a_plan(BUDGET, 7, max_overhead=0.2)[-1]
        < _largest_batch().batch
    )
    assert largest.plan.overhead <= 0.2 < _largest_batch().plan.overhead
    assert largest.is_proved
    assert "proved: the next one does not fit" in str(largest)
    assert "overhead at most 20.0%" in str(largest)
    assert "too slow, proved" in str(largest)


@pytest.mark.slow
def test_a_step_of_the_largest_batch_runs_within_the_budget() -> None:
    largest = _largest_batch()
    model, args = _mlp(largest.batch)
    gm = remat.lower(remat.rewrite(largest.trace, largest.plan.schedule), model, plan=largest.plan)
    step = run_step(gm, _case(model, args))
    assert step.peak_bytes <= largest.plan.peak_bytes <= BUDGET
    model, args = _mlp(largest.eager_batch + 1)
    assert run_step(model, _case(model, args)).peak_bytes > BUDGET


def _case(model: nn.Module, args: tuple[Any, ...]) -> Case:
    return Case(model, args, loss=lambda out: out["loss"])


@pytest.mark.slow
def test_the_search_goes_down_from_a_start_that_does_not_fit() -> None:
    largest = remat.max_batch(_mlp, "200kB", start=60, costs=COSTS, strategy=STRATEGY)
    assert (largest.batch, largest.eager_batch) == (
        _largest_batch().batch,
        _largest_batch().eager_batch,
    )


def test_the_search_goes_down_from_two_to_one() -> None:
    largest = remat.max_batch(_mlp, 90_000, start=2, costs=COSTS, strategy=KeepAll())
    assert largest.batch == largest.eager_batch == 1


@pytest.mark.quick_cases("6")
@pytest.mark.parametrize("largest", [1, 3, 6])
def test_the_search_goes_down_from_a_start_for_which_there_is_no_memory(largest: int) -> None:
    """Nor is there for batches between those that were tried and the start."""

    def model_fn(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
        if batch > largest:
            raise torch.OutOfMemoryError
        return _mlp(batch)

    answer = remat.max_batch(model_fn, 100_000, start=10, costs=COSTS, strategy=STRATEGY)
    assert answer.batch == min(largest, 3) == min(largest, max(_batches_with_a_plan(100_000, 4)))
    assert answer.eager_batch == min(largest, 2)


def test_most_limits_the_batch() -> None:
    largest = remat.max_batch(_mlp, "1GiB", most=5, start=2, costs=COSTS)
    assert "nothing over most=5 was tried" in str(largest)
    assert largest.batch == largest.eager_batch == 5
    assert largest.is_proved
    assert largest.attempts == ()
    assert largest.plan.overhead == 0
    assert largest.time_per_sample_s == largest.eager_time_per_sample_s


def test_a_batch_of_one_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(remat.InfeasibleBudget, match="not even a batch of 1") as caught:
        remat.max_batch(_mlp, 20_000, costs=COSTS, strategy=STRATEGY)
    needed = caught.value.min_feasible_bytes
    assert caught.value.is_proved
    assert needed is not None
    assert remat.max_batch(_mlp, needed, costs=COSTS, strategy=STRATEGY).batch == 1


def test_a_batch_of_one_over_the_overhead_is_an_error() -> None:
    def model_fn(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
        return _mlp(4 * batch)

    with pytest.raises(remat.InfeasibleBudget, match=r"a batch of 1 fits .* overhead of"):
        remat.max_batch(model_fn, 120_000, costs=COSTS, strategy=STRATEGY, max_overhead=0.1)


def test_arguments_that_allow_no_answer_are_refused() -> None:
    calls: list[int] = []
    for budget in ("60%", "min", "8 apples", 0):
        with pytest.raises(remat.BudgetError):
            remat.max_batch(calls.append, budget, costs=COSTS)
    assert not calls
    with pytest.raises(remat.TraceError, match="model_fn"):
        remat.max_batch(lambda batch: (batch,), "1GiB", costs=COSTS)
    with pytest.raises(ValueError, match="start is 9"):
        remat.max_batch(_mlp, "1GiB", start=9, most=8)
    with pytest.raises(ValueError, match="max_overhead"):
        remat.max_batch(_mlp, "1GiB", max_overhead=-1.0)


@pytest.mark.slow
def test_the_batch_can_be_searched_for_an_absent_gpu() -> None:
    library_bytes = remat.trace(*_mlp(1), device="h100").library_bytes
    assert library_bytes >= 32 << 20, "cuBLAS, on Hopper"
    budget = library_bytes + 2 * BUDGET
    largest = remat.max_batch(_mlp, 80 << 20, device="h100", most=9, strategy=STRATEGY)
    assert largest.trace.gpu == "h100"
    assert largest.trace.cost_source == "roofline h100"
    assert largest.batch == 9
    reserved = remat.max_batch(
        _mlp, budget, device="h100", most=9, strategy=STRATEGY, reserve=BUDGET
    )
    assert 0 < reserved.batch < 9
    assert reserved.plan.stats["reserved_for_others_bytes"] == BUDGET
    if not torch.cuda.is_available():
        with pytest.raises(remat.BudgetError, match="the h100 is not here"):
            remat.max_batch(_mlp, "auto", device="h100")


def test_auto_is_the_free_memory_of_the_device() -> None:
    largest = remat.max_batch(_mlp, "auto", most=2, costs=COSTS)
    assert largest.batch == 2
    assert largest.budget_bytes > 1 << 20


def test_a_model_on_the_meta_device_is_searched() -> None:
    with torch.device("meta"):
        model = Mlp(width=4096, depth=2)

    def model_fn(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        return model, {"x": torch.empty(batch, 4096, device="meta")}

    largest = remat.max_batch(model_fn, "1GiB", costs=COSTS, strategy=PerBlock(), start=4000)
    assert largest.eager_batch > 4000
    assert largest.plan.peak_bytes > 1 << 29
    assert not largest.is_proved
    assert "not proved" in str(largest)
    assert next(model.parameters()).is_meta
