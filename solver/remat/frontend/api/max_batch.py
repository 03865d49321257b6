"""`max_batch`: the largest batch whose training step fits a budget."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remat.batch import Attempt, MaxBatch
from remat.costs.roofline import Roofline
from remat.errors import BudgetError, InfeasibleBudget
from remat.frontend.api.batch_search import BatchSearch, Call
from remat.frontend.common.target import find_target
from remat.frontend.costs.cache import CostCache
from remat.frontend.memory.reserve import Reserve, reserved
from remat.limits.budget import Budget, format_bytes, is_auto
from remat.planned import with_reserve
from remat.strategies import Auto, Strategy


def max_batch(
    model_fn: Callable[[int], Call],
    budget: int | str,
    *,
    start: int = 1,
    most: int = 65536,
    strategy: Strategy | None = None,
    costs: str | Roofline | None = None,
    cache: CostCache | str | None = None,
    max_overhead: float | None = None,
    progress: Callable[[Attempt], None] | None = None,
    reserve: Reserve | None = None,
    device: str | torch.device | None = None,
) -> MaxBatch:
    """The largest batch, up to `most`, whose training step fits `budget`, with its plan.

    `model_fn(batch)` returns `(model, args)`, `(model, kwargs)` or `(model, args, kwargs)` for a
    batch of that size; the model may be the same each time, and all may be on the "meta" device.
    Where it runs out of memory, the batch does not fit.
    `device` is where the step will run, as in `remat.trace`: with "h100" batches are searched for a
    GPU that is not here, priced by its data sheet.
    `budget` is bytes, a string such as "8GiB", or "auto" (what the device has free while the model
    and the first batch live, and what they hold). `reserve` is left of it, as in `remat.optimize`.
    With `max_overhead`, the plan's overhead is at most that (0.1 is
    10%). `start` is the first batch to be captured; smaller ones only if it does not fit. `costs`
    and `cache` are as in `remat.optimize`, `strategy` as in `remat.solve`; each batch near the
    answer is solved for within its time limit. `progress` is told each attempt.

    Assumes that what fits for a batch fits for every smaller one. Then the answer is the largest
    if the next batch is proved not to fit (`is_proved`); else no plan for it was found in the time.

    Raises `InfeasibleBudget` where not even a batch of 1 fits, `BudgetError` for a budget that is
    no number of bytes, `TraceError`, `SolverTimeout`, and ValueError for `start` or `most`.
    """
    if not 1 <= start <= most:
        raise ValueError(f"1 <= start <= most is needed; start is {start}, most is {most}")
    if max_overhead is not None and not max_overhead >= 0:
        raise ValueError(f"max_overhead is {max_overhead}; it is zero or more (0.1 is 10%)")
    wanted = None if is_auto(budget) else _absolute(Budget.parse(budget))
    if (target := find_target(device)) is not None:
        if wanted is None:
            raise BudgetError(
                f'the budget "auto" is what a device has free, and the {target.name} is not here; '
                'pass bytes, such as "75GiB"'
            )
        costs = costs or Roofline(target.name)
    strategy, left = strategy or Auto(), reserved(reserve)
    search = BatchSearch(
        model_fn, strategy, costs, cache, max_overhead, progress, most, device, wanted, left
    )
    search.begin(start)
    eager = search.largest_eager(start)
    batch, neighbour = search.largest(eager, start)
    if batch == 0:
        assert neighbour is not None
        raise _nothing_fits(neighbour, search)
    traced = search.trace(batch)
    return MaxBatch(
        batch=batch,
        budget_bytes=search.budget_bytes,
        max_overhead=max_overhead,
        plan=with_reserve(search.best_plan(batch), left.total_bytes),
        trace=traced,
        eager_batch=eager,
        eager_time_s=search.trace(eager).graph().total_cost_s if eager else None,
        is_proved=neighbour is None or neighbour.is_proved,
        attempts=tuple(search.attempts),
        is_most=batch == search.most and not search.is_full,
    )


def _absolute(budget: Budget) -> Budget:
    if budget.size_bytes is None:
        raise BudgetError(
            f"the budget {budget.given!r} is another number of bytes for each batch, so any batch "
            'would fit; pass bytes, such as "8GiB", or "auto"'
        )
    return budget


def _nothing_fits(attempt: Attempt, search: BatchSearch) -> InfeasibleBudget:
    budget = format_bytes(search.budget_bytes)
    if attempt.overhead is not None:
        return InfeasibleBudget(
            f"a batch of 1 fits {budget}, but with an overhead of {attempt.overhead:.1%} where "
            f"max_overhead is {search.max_overhead:.1%}; allow more, or pass a larger budget",
            is_proved=attempt.is_proved,
        )
    least = attempt.least_bytes
    needs = "" if least is None else f"; it needs {format_bytes(least)} ({least:,} bytes)"
    return InfeasibleBudget(
        f"not even a batch of 1 fits {budget} ({search.budget_bytes:,} bytes){needs}. Pass a "
        "larger budget, a smaller model, or shorter inputs",
        min_feasible_bytes=least,
        is_proved=attempt.is_proved,
    )
