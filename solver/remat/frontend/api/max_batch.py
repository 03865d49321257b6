"""`max_batch`: find the largest batch whose training step fits a budget."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remat.batch import BatchAttempt, MaxBatch
from remat.costs.roofline import Roofline
from remat.errors import BudgetError, InfeasibleBudget
from remat.frontend.api.batch_search import BatchSearch, ModelFnResult
from remat.frontend.common.target_gpu import find_target_gpu
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.measure import check_cost_source
from remat.frontend.memory.device_memory import Reserve, reserve_size
from remat.limits.budget import Budget, is_auto
from remat.limits.units import format_bytes
from remat.plan_data import with_reserve
from remat.plan_options import check_option
from remat.strategies import Auto, Strategy


def max_batch(
    model_fn: Callable[[int], ModelFnResult],
    budget: int | str,
    *,
    start: int = 1,
    most: int = 65536,
    strategy: Strategy | None = None,
    costs: str | Roofline | None = None,
    cache: CostCache | str | None = None,
    max_overhead: float | None = None,
    progress: Callable[[BatchAttempt], None] | None = None,
    reserve: Reserve | None = None,
    device: str | torch.device | None = None,
) -> MaxBatch:
    """Find the largest batch, up to `most`, whose training step fits `budget`; return its plan.

    `model_fn(batch)` returns `(model, args)`, `(model, kwargs)` or `(model, args, kwargs)` for a
    batch of that size. The model may be the same each time, and all may be on the "meta" device. If
    `model_fn` runs out of memory, the batch does not fit.

    `device` is where the step will run, as in `remat.trace`: with "h100", the search is for a GPU
    that this machine does not have, with costs from its data sheet. `budget` is bytes, a string
    such as "8GiB", or "auto": what the device has free while the model and the first batch are in
    memory, plus their own size. `reserve` is subtracted from it, as in `remat.optimize`. With
    `max_overhead`, the plan's overhead is at most that (0.1 is 10%). `start` is the first batch to
    be captured; smaller batches only if it does not fit. `costs` and `cache` are as in
    `remat.optimize`, `strategy` as in `remat.solve`; each batch near the answer is solved within
    the strategy's time limit. `progress` is called after each attempt.

    Assumes that if a batch fits, every smaller one fits. Then the answer is the largest batch if
    the next one is proved not to fit (`is_proved`); else no plan for the next one was found within
    the time limit.

    Raises `InfeasibleBudget` where not even a batch of 1 fits, `BudgetError` unless the budget is
    in bytes or "auto", `TraceError`, `SolverTimeout`, and ValueError for `start` or `most`.
    """
    if not 1 <= start <= most:
        raise ValueError(f"1 <= start <= most is needed; start is {start}, most is {most}")
    if max_overhead is not None and not max_overhead >= 0:
        raise ValueError(f"max_overhead is {max_overhead}; it is zero or more (0.1 is 10%)")
    check_option("strategy", strategy)
    check_option("progress", progress)
    check_cost_source(costs)
    parsed_budget = None if is_auto(budget) else _check_in_bytes(Budget.parse(budget))
    if (target := find_target_gpu(device)) is not None:
        if parsed_budget is None:
            raise BudgetError(
                f'the budget "auto" is what a device has free, and the {target.name} is not here; '
                'pass bytes, such as "75GiB"'
            )
        costs = costs or Roofline(target.name)
    reserved = reserve_size(reserve)
    search = BatchSearch(
        model_fn,
        strategy or Auto(),
        costs,
        cache,
        max_overhead,
        progress,
        most,
        device,
        parsed_budget,
        reserved,
    )
    search.read_budget(start)
    eager_batch = search.largest_eager_batch(start)
    batch, next_attempt = search.largest_batch(eager_batch, start)
    if batch == 0:
        assert next_attempt is not None
        raise _nothing_fits(next_attempt, search)
    traced = search.trace(batch)
    return MaxBatch(
        batch=batch,
        budget_bytes=search.budget_bytes,
        max_overhead=max_overhead,
        plan=with_reserve(search.best_plan(batch), reserved.total_bytes),
        trace=traced,
        eager_batch=eager_batch,
        eager_time_s=search.trace(eager_batch).graph().total_cost_s if eager_batch else None,
        is_proved=next_attempt is None or next_attempt.is_proved,
        attempts=tuple(search.attempts),
        reached_most=batch == search.max_batch and not search.is_out_of_memory,
    )


def _check_in_bytes(budget: Budget) -> Budget:
    """Return the budget. Raise `BudgetError` unless it is in bytes."""
    if budget.size_bytes is None:
        raise BudgetError(
            f"the budget {budget.requested!r} is another number of bytes for each batch, so any "
            'batch would fit; pass bytes, such as "8GiB", or "auto"'
        )
    return budget


def _nothing_fits(attempt: BatchAttempt, search: BatchSearch) -> InfeasibleBudget:
    """Return the error for a failed attempt at a batch of 1."""
    budget = format_bytes(search.budget_bytes)
    if attempt.overhead is not None:
        return InfeasibleBudget(
            f"a batch of 1 fits {budget}, but with an overhead of {attempt.overhead:.1%} where "
            f"max_overhead is {search.max_overhead:.1%}; allow more, or pass a larger budget",
            is_proved=attempt.is_proved,
        )
    min_bytes = attempt.min_peak_bytes
    needs = (
        "" if min_bytes is None else f"; it needs {format_bytes(min_bytes)} ({min_bytes:,} bytes)"
    )
    return InfeasibleBudget(
        f"not even a batch of 1 fits {budget} ({search.budget_bytes:,} bytes){needs}. Pass a "
        "larger budget, a smaller model, or shorter inputs",
        min_feasible_bytes=min_bytes,
        is_proved=attempt.is_proved,
    )
