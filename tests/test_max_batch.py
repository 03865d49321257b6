"""`remat.max_batch`: the batch that trying them all finds, and a step that really runs in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.harness import run_step
from tests.models import Case, Mlp
from torch import nn

import remat
from remat.batch import Attempt, MaxBatch
from remat.strategies import Strategy

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=10.0)
MODEL = Mlp(width=64, depth=2)
BUDGET = 200_000
MOST = 9
"""One more than fits `BUDGET`, and then one."""


def _mlp(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return MODEL, (torch.zeros(16 * batch, 64),)


@cache
def _trace(batch: int) -> remat.Trace:
    return remat.measure(remat.trace(*_mlp(batch)), COSTS)


@cache
def _found() -> MaxBatch:
    return remat.max_batch(_mlp, BUDGET, costs=COSTS, strategy=STRATEGY)


def _fitting(
    budget: int, most: int, strategy: Strategy = STRATEGY, max_overhead: float = 1e9
) -> list[int]:
    """The batches with a plan, by trying them all."""
    found: list[int] = []
    for batch in range(1, most + 1):
        try:
            plan = remat.solve(_trace(batch), budget, strategy)
        except remat.InfeasibleBudget:
            continue
        if plan.overhead <= max_overhead:
            found.append(batch)
    return found


@pytest.mark.parametrize(("budget", "most"), [(120_000, 6), (BUDGET, MOST)])
def test_finds_what_trying_all_finds(budget: int, most: int) -> None:
    fitting, eager = _fitting(budget, most), _fitting(budget, most, remat.KeepAll())
    assert fitting == list(range(1, len(fitting) + 1))
    told: list[Attempt] = []
    found = remat.max_batch(_mlp, budget, costs=COSTS, strategy=STRATEGY, progress=told.append)
    assert found.batch == fitting[-1] < most
    assert found.eager_batch == eager[-1] < found.batch
    assert found.is_proved
    assert found.budget_bytes == budget >= found.plan.peak_bytes
    assert found.trace == _trace(found.batch)
    assert tuple(told) == found.attempts
    assert len(told) <= 6
    neighbour = next(a for a in told if a.batch == found.batch + 1)
    assert not neighbour.fits
    assert neighbour.least_bytes is not None
    assert neighbour.least_bytes > budget
    for words in (f"batch     {found.batch},", "proved", "a sample", "does not fit, proved"):
        assert words in found.describe()


def test_an_overhead_that_is_allowed_limits_the_batch() -> None:
    found = remat.max_batch(_mlp, BUDGET, costs=COSTS, strategy=STRATEGY, max_overhead=0.2)
    assert found.batch == _fitting(BUDGET, 7, max_overhead=0.2)[-1] < _found().batch
    assert found.plan.overhead <= 0.2 < _found().plan.overhead
    assert found.is_proved
    assert "proved: the next one does not fit" in str(found)
    assert "overhead at most 20.0%" in str(found)
    assert "too slow, proved" in str(found)


def test_the_step_at_that_batch_runs_within_the_budget() -> None:
    found = _found()
    model, args = _mlp(found.batch)
    gm = remat.lower(remat.rewrite(found.trace, found.plan.schedule), model, plan=found.plan)
    step = run_step(gm, _case(model, args))
    assert step.peak_bytes <= found.plan.peak_bytes <= BUDGET
    model, args = _mlp(found.eager_batch + 1)
    assert run_step(model, _case(model, args)).peak_bytes > BUDGET


def _case(model: nn.Module, args: tuple[Any, ...]) -> Case:
    return Case(model, args, loss=lambda out: out["loss"])


def test_a_start_that_does_not_fit_goes_down() -> None:
    found = remat.max_batch(_mlp, "200kB", start=60, costs=COSTS, strategy=STRATEGY)
    assert (found.batch, found.eager_batch) == (_found().batch, _found().eager_batch)


def test_a_start_of_two_that_does_not_fit_goes_down_to_one() -> None:
    found = remat.max_batch(_mlp, 90_000, start=2, costs=COSTS, strategy=remat.KeepAll())
    assert found.batch == found.eager_batch == 1


def test_most_is_a_limit() -> None:
    found = remat.max_batch(_mlp, "1GiB", most=5, start=2, costs=COSTS)
    assert "nothing over most=5 was tried" in str(found)
    assert found.batch == found.eager_batch == 5
    assert found.is_proved
    assert found.attempts == ()
    assert found.plan.overhead == 0
    assert found.time_per_sample_s == found.eager_time_per_sample_s


def test_not_even_one_fits() -> None:
    with pytest.raises(remat.InfeasibleBudget, match="not even a batch of 1") as caught:
        remat.max_batch(_mlp, 20_000, costs=COSTS, strategy=STRATEGY)
    needed = caught.value.min_feasible_bytes
    assert caught.value.is_proved
    assert needed is not None
    assert remat.max_batch(_mlp, needed, costs=COSTS, strategy=STRATEGY).batch == 1


def test_not_even_one_is_fast_enough() -> None:
    def model_fn(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
        return _mlp(4 * batch)

    with pytest.raises(remat.InfeasibleBudget, match=r"a batch of 1 fits .* overhead of"):
        remat.max_batch(model_fn, 120_000, costs=COSTS, strategy=STRATEGY, max_overhead=0.1)


def test_what_no_answer_can_be_given_for() -> None:
    made: list[int] = []
    for budget in ("60%", "min", "8 apples", 0):
        with pytest.raises(remat.BudgetError):
            remat.max_batch(made.append, budget, costs=COSTS)
    assert not made
    with pytest.raises(remat.TraceError, match="model_fn"):
        remat.max_batch(lambda batch: (batch,), "1GiB", costs=COSTS)
    with pytest.raises(ValueError, match="start is 9"):
        remat.max_batch(_mlp, "1GiB", start=9, most=8)
    with pytest.raises(ValueError, match="max_overhead"):
        remat.max_batch(_mlp, "1GiB", max_overhead=-1.0)


def test_for_a_gpu_that_is_not_here() -> None:
    library_bytes = remat.trace(*_mlp(1), device="h100").library_bytes
    assert library_bytes >= 32 << 20, "cuBLAS, on Hopper"
    budget = library_bytes + 2 * BUDGET
    found = remat.max_batch(_mlp, 80 << 20, device="h100", most=9, strategy=STRATEGY)
    assert found.trace.gpu == "h100"
    assert found.trace.cost_source == "roofline h100"
    assert found.batch == 9
    reserved = remat.max_batch(
        _mlp, budget, device="h100", most=9, strategy=STRATEGY, reserve=BUDGET
    )
    assert 0 < reserved.batch < 9
    assert reserved.plan.stats["left_to_others_bytes"] == BUDGET
    if not torch.cuda.is_available():
        with pytest.raises(remat.BudgetError, match="the h100 is not here"):
            remat.max_batch(_mlp, "auto", device="h100")


def test_auto_is_what_the_device_has_free() -> None:
    found = remat.max_batch(_mlp, "auto", most=2, costs=COSTS)
    assert found.batch == 2
    assert found.budget_bytes > 1 << 20


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = Mlp(width=4096, depth=2)

    def model_fn(batch: int) -> tuple[nn.Module, dict[str, Any]]:
        return model, {"x": torch.empty(batch, 4096, device="meta")}

    found = remat.max_batch(model_fn, "1GiB", costs=COSTS, strategy=remat.PerBlock(), start=4000)
    assert found.eager_batch > 4000
    assert found.plan.peak_bytes > 1 << 29
    assert not found.is_proved
    assert "not proved" in str(found)
    assert next(model.parameters()).is_meta
