"""`max_batch`: find the largest batch whose training step fits a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat.batch import BatchAttempt, MaxBatch
from remat.costs.roofline import Roofline
from remat.documents.trace import Trace
from remat.errors import BudgetError, InfeasibleBudget, SolverTimeout, TraceError
from remat.frontend.capture.trace import trace as capture
from remat.frontend.common.target_gpu import find_target_gpu
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.measure import check_cost_source, measure
from remat.frontend.memory.device_memory import Reserve, ReserveSize, auto_limits, reserve_size
from remat.limits.budget import Budget, is_auto
from remat.limits.limits import Limits
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_data import with_reserve
from remat.plan_options import check_option
from remat.progress import Progress
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Auto, Strategy
from remat.strategies.baselines.quick import quick_baseline_schedules


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
    parsed_budget = None if is_auto(budget) else _check_budget_in_bytes(Budget.parse(budget))
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
        raise _no_batch_fits_error(next_attempt, search)
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


def _check_budget_in_bytes(budget: Budget) -> Budget:
    """Return the budget. Raise `BudgetError` unless it is in bytes."""
    if budget.size_bytes is None:
        raise BudgetError(
            f"the budget {budget.requested!r} is another number of bytes for each batch, so any "
            'batch would fit; pass bytes, such as "8GiB", or "auto"'
        )
    return budget


def _no_batch_fits_error(attempt: BatchAttempt, search: BatchSearch) -> InfeasibleBudget:
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


_MAX_GROWTH = 8
"""Largest factor between a guessed batch and the batches before it. `model_fn` allocates real
inputs; and where gradients are the peak of small batches, a line through these is too flat."""

_MAX_LINE_GUESSES = 6
"""Number of guesses by a line; after them, the search halves the interval."""

ModelFnResult = tuple[Any, ...]
"""(model, args), (model, kwargs) or (model, args, kwargs)."""


@dataclass
class BatchSearch:
    """The state of one search: what `max_batch` was called with, captured batches and attempts.

    A `budget` of None is "auto". `max_batch` is the largest batch that may be tried: it falls when
    `model_fn` runs out of memory, which sets `is_out_of_memory`. `budget_bytes` is the budget after
    the reserve; `segments_bytes` limits the segments of torch's allocator if the budget is "auto".
    """

    model_fn: Callable[[int], ModelFnResult]
    strategy: Strategy
    costs: str | Roofline | None
    cache: CostCache | str | None
    max_overhead: float | None
    progress: Callable[[BatchAttempt], None] | None
    max_batch: int
    device: str | torch.device | None
    budget: Budget | None
    reserve: ReserveSize
    budget_bytes: int = 0
    attempts: list[BatchAttempt] = field(default_factory=list)
    segments_bytes: int | None = None
    is_out_of_memory: bool = False
    _traces: dict[int, Trace] = field(default_factory=dict)
    _plans: dict[int, Plan] = field(default_factory=dict)

    # -- peaks of a batch -------------------------------------------------------------------

    def read_budget(self, start: int) -> None:
        """Set `budget_bytes`. The budget "auto" is read while the model and the first batch for
        which there is memory (`start`, a half of it, and so on) are allocated. Raises
        `InfeasibleBudget` if there is memory for none."""
        batch = start
        while batch:
            try:
                model_and_inputs = self._call_model_fn(batch)
                break
            except _BatchTooLargeError:
                batch //= 2
        else:
            raise InfeasibleBudget("model_fn(1) ran out of memory: not even a batch of 1 fits")
        traced = self.trace(batch, model_and_inputs)
        if self.budget is None:
            is_allocated = any(p.device.type != "meta" for p in model_and_inputs[0].parameters())
            limits = auto_limits(traced, self.reserve, is_allocated=is_allocated)
            self.segments_bytes = limits.segments_bytes
        else:
            limits = Limits(self.budget, self.reserve.total_bytes)
        budget_bytes = limits.budget_after_reserve.size_bytes
        assert budget_bytes is not None  # `max_batch` takes no relative budget
        self.budget_bytes = budget_bytes

    def trace(self, batch: int, model_and_inputs: _ModelAndInputs | None = None) -> Trace:
        """Return the trace of a batch's step with costs; capture it the first time. Raises
        `_BatchTooLargeError`."""
        if batch not in self._traces:
            model, args, kwargs = model_and_inputs or self._call_model_fn(batch)
            traced = capture(model, args, kwargs, device=self.device)
            costs = self.costs or traced.device.split(":")[0]
            self._traces[batch] = measure(traced, costs, cache=self.cache)
        return self._traces[batch]

    def _call_model_fn(self, batch: int) -> _ModelAndInputs:
        """Return the model and inputs for a batch. Raises `_BatchTooLargeError` where `model_fn`
        runs out of memory."""
        if batch > self.max_batch:
            raise _BatchTooLargeError
        try:
            return parse_model_fn_result(self.model_fn(batch))
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        # The traceback references the tensors of this batch; free them before the next batch.
        self.max_batch, self.is_out_of_memory = batch - 1, True
        raise _BatchTooLargeError

    def eager_peak_bytes(self, batch: int) -> int:
        """Return the peak without recomputation."""
        graph = self.trace(batch).graph()
        return simulate(graph, Schedule.keep_all(graph)).peak_bytes

    def quick_min_peak_bytes(self, batch: int) -> int:
        """Return the smallest peak without a solver: without recomputation, or by fast baseline
        strategies."""
        graph = self.trace(batch).graph()
        schedules = [
            Schedule.keep_all(graph),
            *quick_baseline_schedules(graph),
        ]
        return min(simulate(graph, schedule).peak_bytes for schedule in schedules)

    # -- searches ---------------------------------------------------------------------------

    def largest_eager_batch(self, start: int) -> int:
        """Return the largest batch that fits without recomputation, 0 if none does."""
        fits, exceeds = 0, self.max_batch + 1
        points: list[tuple[int, int]] = []
        guess = start
        while exceeds - fits > 1:
            guess = min(max(guess, fits + 1), exceeds - 1)
            try:
                points.append((guess, self.eager_peak_bytes(guess)))
            except _BatchTooLargeError:
                exceeds = guess
                guess = (fits + exceeds) // 2
                continue
            if points[-1][1] <= self.budget_bytes:
                fits = guess
            else:
                exceeds = guess
            if len(points) == 1:
                guess = 2 * guess
            elif len(points) <= _MAX_LINE_GUESSES:
                guess = self._batch_at_budget(points[-2], points[-1])
                guess = min(guess, _MAX_GROWTH * max(points)[0])
            else:
                guess = (fits + min(exceeds, _MAX_GROWTH * fits)) // 2
        return fits

    def largest_batch(self, eager_batch: int, start: int) -> tuple[int, BatchAttempt | None]:
        """Return the largest batch with a plan, 0 if there is none, and the failed attempt at the
        next batch; None if that is more than `max_batch`. `eager_batch` must fit without
        recomputation."""
        fits = eager_batch
        first = min(max(fits, start), self.max_batch)
        try:
            first_point = first, self.quick_min_peak_bytes(first)
        except _BatchTooLargeError:
            first = max(self._traces)
            first_point = first, self.quick_min_peak_bytes(first)
        second = 2 * first if 2 * first <= self.max_batch else max(1, first // 2)
        try:
            line = first_point, (second, self.quick_min_peak_bytes(second))
        except _BatchTooLargeError:
            line = first_point, first_point
        if fits == self.max_batch:
            return fits, self._out_of_memory_attempt(fits + 1)
        exceeds = self.max_batch + 1
        failed = self._out_of_memory_attempt(exceeds)
        guess = min(self._batch_at_budget(*line), _MAX_GROWTH * first)
        bytes_at_zero = _bytes_of_empty_batch(*line)
        step = max(1, first // 4)
        slow_rounds = 0  # successive rounds that did not halve the interval
        while exceeds - fits > 1:
            batch = min(max(guess, fits + 1), exceeds - 1)
            width = exceeds - fits
            try:
                attempt = self._try_batch(batch)
            except _BatchTooLargeError:
                attempt = self._out_of_memory_attempt(batch)
                assert attempt is not None
            if attempt.fits:
                fits = batch
            else:
                exceeds, failed = batch, attempt
            slow_rounds = slow_rounds + 1 if exceeds - fits > width / 2 else 0
            if failed is None:
                guess, step = fits + step, 2 * step
            elif slow_rounds > 1 or failed.min_peak_bytes is None:
                guess = (fits + exceeds) // 2
            else:
                guess = self._batch_at_budget((0, bytes_at_zero), (exceeds, failed.min_peak_bytes))
        return fits, failed

    def _out_of_memory_attempt(self, batch: int) -> BatchAttempt | None:
        """Record and return the attempt at a batch for which `model_fn` has no memory; None if it
        never ran out of memory."""
        if not self.is_out_of_memory:
            return None
        return self._record_attempt(
            BatchAttempt(batch, fits=False, is_proved=False, elapsed_s=0.0, out_of_memory=True)
        )

    def best_plan(self, batch: int) -> Plan:
        """Solve a batch until the strategy ends; return its plan, or the plan from the search if
        that is faster or no other is found."""
        search_plan = self._plans.get(batch)
        try:
            traced = self.trace(batch)
            plan = solve(
                traced, self.budget_bytes, self.strategy, reserved_bytes=self.segments_bytes
            )
        except (InfeasibleBudget, SolverTimeout):
            if search_plan is None:
                raise
            return search_plan
        return plan if search_plan is None or plan.time_s <= search_plan.time_s else search_plan

    def _batch_at_budget(self, *points: tuple[int, int]) -> int:
        """Return the last batch at which the line through two points of (batch, bytes) is within
        the budget."""
        (x, a), (y, b) = sorted(points)
        return self.max_batch if b <= a else x + (self.budget_bytes - a) * (y - x) // (b - a)

    def _try_batch(self, batch: int) -> BatchAttempt:
        """Solve a batch until it is clear whether it fits; record and return the attempt."""
        start = time.monotonic()
        traced = self.trace(batch)
        stop = _StopWhenDecided(self.max_overhead)
        outcome: dict[str, Any]
        try:
            plan = solve(traced, self.budget_bytes, self.strategy, progress=stop, cancel=stop.event)
        except InfeasibleBudget as error:
            outcome = {
                "fits": False,
                "is_proved": error.is_proved,
                "min_peak_bytes": error.min_feasible_bytes,
            }
        except SolverTimeout:
            outcome = {"fits": False, "is_proved": False}
        else:
            outcome = self._attempt_fields(plan)
            self._plans[batch] = plan
        return self._record_attempt(
            BatchAttempt(batch=batch, elapsed_s=time.monotonic() - start, **outcome)
        )

    def _record_attempt(self, attempt: BatchAttempt) -> BatchAttempt:
        """Append the attempt, call `progress` with it, and return it."""
        self.attempts.append(attempt)
        if self.progress is not None:
            self.progress(attempt)
        return attempt

    def _attempt_fields(self, plan: Plan) -> dict[str, Any]:
        """Return the fields of an attempt that has a plan: it fits unless its overhead is above
        `max_overhead`."""
        limit = self.max_overhead
        fits = limit is None or plan.overhead <= limit
        bound = plan.lower_bound
        return {
            "fits": fits,
            "is_proved": fits or (bound is not None and limit is not None and bound > limit),
            "peak_bytes": plan.peak_bytes,
            "overhead": plan.overhead,
        }


class _StopWhenDecided:
    """Stops a solve as soon as it is clear whether the batch fits: a progress callback that sets
    `event`, which cancels the solve. A faster plan is not needed then."""

    def __init__(self, max_overhead: float | None) -> None:
        self.event = threading.Event()
        self._limit = max_overhead

    def __call__(self, progress: Progress) -> None:
        overhead, bound, limit = progress.incumbent, progress.bound, self._limit
        if progress.phase != "cost" or overhead is None:
            return
        if limit is None or overhead <= limit or (bound is not None and bound > limit):
            self.event.set()


class _BatchTooLargeError(Exception):
    """`model_fn` has no memory for a batch."""


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """True if the error says that memory could not be allocated, on any device."""
    message = str(error).lower()
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in message
        or "can't allocate memory" in message
    )


_ModelAndInputs = tuple[nn.Module, Any, Mapping[str, Any] | None]


def parse_model_fn_result(returned: object) -> _ModelAndInputs:
    """Return the model, inputs and keyword inputs that `model_fn` returned. Raises `TraceError`
    for any other value."""
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        model, inputs, *rest = returned
        if isinstance(model, nn.Module) and all(isinstance(r, Mapping) for r in rest):
            return model, inputs, rest[0] if rest else None
    raise TraceError(
        "model_fn(batch) must return (model, args), (model, kwargs) or (model, args, kwargs), got "
        f"{type(returned).__name__}"
    )


def _bytes_of_empty_batch(*points: tuple[int, int]) -> int:
    """Return the bytes of an empty batch, by the line through two points of (batch, bytes)."""
    (x, a), (y, b) = sorted(points)
    return a if x == y else max(0, a - (b - a) * x // (y - x))
