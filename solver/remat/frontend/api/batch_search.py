"""The search behind `max_batch`: what a batch takes, and which is the largest that fits.

The peak without recomputation, and roughly the smallest peak with it, is affine in the batch: a
line through two captures guesses where it meets the budget, and the solver decides around there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat.allocator.fitting import solve_within
from remat.batch import Attempt
from remat.costs.roofline import Roofline
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, SolverTimeout, TraceError
from remat.frontend.capture.trace import trace as capture
from remat.frontend.costs.cache import CostCache
from remat.frontend.costs.measure import measure
from remat.frontend.memory.auto_budget import available
from remat.frontend.memory.reserve import Reserved
from remat.limits.budget import Budget
from remat.limits.reserve import less_reserve
from remat.plan import Plan
from remat.progress import Progress
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Strategy
from remat.strategies.search.steps.baselines import quick_schedules

_LEAP = 8
"""How many times larger than those before a guess may be: `model_fn` makes real inputs, and where
gradients are the peak of small batches, a line through those promises too much."""

_LINES = 6
"""Guesses by a line; after them, what is left is halved."""

Call = tuple[Any, ...]
"""(model, args), (model, kwargs) or (model, args, kwargs)."""


@dataclass
class BatchSearch:
    model_fn: Callable[[int], Call]
    strategy: Strategy
    costs: str | Roofline | None
    cache: CostCache | str | None
    max_overhead: float | None
    progress: Callable[[Attempt], None] | None
    most: int
    device: str | torch.device | None
    budget: Budget | None  # without, it is what the device has free
    reserve: Reserved
    budget_bytes: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    segments_bytes: int | None = None
    is_full: bool = False
    _traces: dict[int, Trace] = field(default_factory=dict)
    _plans: dict[int, Plan] = field(default_factory=dict)

    # -- what a batch takes -----------------------------------------------------------------

    def begin(self, start: int) -> None:
        """Read the budget while the model and the first batch that can be made live."""
        batch = start
        while batch:
            try:
                call = self._call(batch)
                break
            except _TooLarge:
                batch //= 2
        else:
            raise InfeasibleBudget("model_fn(1) ran out of memory: not even a batch of 1 fits")
        traced = self.trace(batch, call)
        if self.budget is None:
            is_there = any(t.device.type != "meta" for t in call[0].parameters())
            found = available(traced, missing_bytes=self.reserve.missing_bytes, is_there=is_there)
            self.budget_bytes, self.segments_bytes = found.budget_bytes, found.reserved_bytes
            return
        self.budget_bytes = less_reserve(self.budget, self.reserve.total_bytes)

    def trace(self, batch: int, call: _Made | None = None) -> Trace:
        """The step for a batch, captured once, with costs. Raises `_TooLarge`."""
        if batch not in self._traces:
            model, args, kwargs = call or self._call(batch)
            traced = capture(model, args, kwargs, device=self.device)
            costs = self.costs or traced.device.split(":")[0]
            self._traces[batch] = measure(traced, costs, cache=self.cache)
        return self._traces[batch]

    def _call(self, batch: int) -> _Made:
        """What `model_fn` makes. Raises `_TooLarge` where there is no memory for it."""
        if batch > self.most:
            raise _TooLarge
        try:
            return _call(self.model_fn(batch))
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        # The error holds what was made; it has to be gone before the next batch.
        self.most, self.is_full = batch - 1, True
        raise _TooLarge

    def eager_bytes(self, batch: int) -> int:
        """The peak without recomputation."""
        graph = self.trace(batch).graph()
        return simulate(graph, Schedule.keep_all(graph)).peak_bytes

    def quick_bytes(self, batch: int) -> int:
        """The smallest peak that quick baselines reach."""
        graph = self.trace(batch).graph()
        schedules = [Schedule.keep_all(graph), *quick_schedules(graph, None, lambda: False)]
        return min(simulate(graph, schedule).peak_bytes for schedule in schedules)

    # -- searches ---------------------------------------------------------------------------

    def largest_eager(self, start: int) -> int:
        """The largest batch that fits without recomputation, 0 if none does."""
        low, high = 0, self.most + 1
        points: list[tuple[int, int]] = []
        guess = start
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            try:
                points.append((guess, self.eager_bytes(guess)))
            except _TooLarge:
                high = guess
                guess = (low + high) // 2
                continue
            if points[-1][1] <= self.budget_bytes:
                low = guess
            else:
                high = guess
            if len(points) == 1:
                guess = 2 * guess
            elif len(points) <= _LINES:
                guess = min(self._meets(points[-2], points[-1]), _LEAP * max(points)[0])
            else:
                guess = (low + min(high, _LEAP * low)) // 2
        return low

    def largest(self, low: int, start: int) -> tuple[int, Attempt | None]:
        """The largest batch with a plan, 0 if there is none, and the attempt at the next one; None
        if that is over `most`. `low` fits without recomputation."""
        near = min(max(low, start), self.most)
        other = 2 * near if 2 * near <= self.most else max(1, near // 2)
        try:
            line = (near, self.quick_bytes(near)), (other, self.quick_bytes(other))
        except _TooLarge:
            line = (near, self.quick_bytes(near)), (near, self.quick_bytes(near))
        if low == self.most:
            return low, self._full(low + 1)
        high, failed = self.most + 1, self._full(self.most + 1)
        guess, floor_bytes = min(self._meets(*line), _LEAP * near), _intercept(*line)
        step = max(1, near // 4)
        sluggish = 0
        while high - low > 1:
            batch = min(max(guess, low + 1), high - 1)
            width = high - low
            try:
                attempt = self._attempt(batch)
            except _TooLarge:
                attempt = self._full(batch)
                assert attempt is not None
            if attempt.fits:
                low = batch
            else:
                high, failed = batch, attempt
            sluggish = sluggish + 1 if high - low > width / 2 else 0
            if failed is None:
                guess, step = low + step, 2 * step
            elif sluggish > 1 or failed.least_bytes is None:
                guess = (low + high) // 2
            else:
                guess = self._meets((0, floor_bytes), (high, failed.least_bytes))
        return low, failed

    def _full(self, batch: int) -> Attempt | None:
        """The attempt at a batch that cannot be made; None where none was refused."""
        if not self.is_full:
            return None
        return self._noted(
            Attempt(batch, fits=False, is_proved=False, seconds=0.0, out_of_memory=True)
        )

    def best_plan(self, batch: int) -> Plan:
        """The plan at full effort, or the one that the search met, where that is better."""
        known = self._plans.get(batch)
        try:
            traced = self.trace(batch)
            plan = solve_within(
                traced,
                Budget.parse(self.budget_bytes),
                lambda budget: solve(traced, budget, self.strategy),
                reserved_bytes=self.segments_bytes,
            )
        except (InfeasibleBudget, SolverTimeout):
            if known is None:
                raise
            return known
        return plan if known is None or plan.time_s <= known.time_s else known

    def _meets(self, *points: tuple[int, int]) -> int:
        """The last batch at which the line through two points of (batch, bytes) is within the
        budget."""
        (x, a), (y, b) = sorted(points)
        return self.most if b <= a else x + (self.budget_bytes - a) * (y - x) // (b - a)

    def _attempt(self, batch: int) -> Attempt:
        began = time.monotonic()
        traced = self.trace(batch)
        enough = _Enough(self.max_overhead)
        found: dict[str, Any]
        try:
            plan = solve(
                traced, self.budget_bytes, self.strategy, progress=enough, cancel=enough.event
            )
        except InfeasibleBudget as error:
            found = {
                "fits": False,
                "is_proved": error.is_proved,
                "least_bytes": error.min_feasible_bytes,
            }
        except SolverTimeout:
            found = {"fits": False, "is_proved": False}
        else:
            found = self._judged(plan)
            self._plans[batch] = plan
        return self._noted(Attempt(batch=batch, seconds=time.monotonic() - began, **found))

    def _noted(self, attempt: Attempt) -> Attempt:
        self.attempts.append(attempt)
        if self.progress is not None:
            self.progress(attempt)
        return attempt

    def _judged(self, plan: Plan) -> dict[str, Any]:
        limit = self.max_overhead
        fits = limit is None or plan.overhead <= limit
        bound = plan.lower_bound
        return {
            "fits": fits,
            "is_proved": fits or (bound is not None and limit is not None and bound > limit),
            "peak_bytes": plan.peak_bytes,
            "overhead": plan.overhead,
        }


class _Enough:
    """Ends a solve once it is known whether the batch fits: the time is not wanted yet."""

    def __init__(self, max_overhead: float | None) -> None:
        self.event = threading.Event()
        self._limit = max_overhead

    def __call__(self, progress: Progress) -> None:
        known, bound, limit = progress.incumbent, progress.bound, self._limit
        if progress.phase != "cost" or known is None:
            return
        if limit is None or known <= limit or (bound is not None and bound > limit):
            self.event.set()


class _TooLarge(Exception):
    """`model_fn` has no memory for a batch."""


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    said = str(error).lower()
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in said
        or "can't allocate memory" in said
    )


_Made = tuple[nn.Module, Any, Mapping[str, Any] | None]


def _call(returned: object) -> _Made:
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        model, inputs, *rest = returned
        if isinstance(model, nn.Module) and all(isinstance(r, Mapping) for r in rest):
            return model, inputs, rest[0] if rest else None
    raise TraceError(
        "model_fn(batch) must return (model, args), (model, kwargs) or (model, args, kwargs), got "
        f"{type(returned).__name__}"
    )


def _intercept(*points: tuple[int, int]) -> int:
    """What a batch of none would take, by the line through two points of (batch, bytes)."""
    (x, a), (y, b) = sorted(points)
    return a if x == y else max(0, a - (b - a) * x // (y - x))
