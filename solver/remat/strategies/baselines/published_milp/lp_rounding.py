"""Two-phase rounding of the linear relaxation.

Jain et al.: Checkmate (MLSys 2020), section 5: solve the relaxed program, round what it holds (S),
and run again what is then missing, and only that (R). As the rounded schedule may exceed the
budget, the program gets (1 - epsilon) of it, for the least epsilon that works.

The relaxation is that of `remat.milp.model` over complete slots, which is tighter than the
paper's, and its optimum a bound on every schedule of the order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout
from remat.graph import Graph
from remat.milp import model, slots
from remat.milp.model import MilpModel
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.outcome import Outcome
from remat.progress import Cancel
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution, Stats
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import select_cheapest
from remat.strategies.baselines.published_milp.rounding import retained_share_matrix, rounded
from remat.strategies.infeasible import infeasible
from remat.strategies.options import Checked, Seconds, Seed, Share, Threads, between

_THRESHOLDS = (0.5, 0.25, 0.75)
_MORE = 0.2
"""Where only the peak counts, the program holds and runs by fractions; cost makes it decide."""


@dataclass(frozen=True)
class LpRounding(Checked):
    """Checkmate's approximation: deterministic rounding at 0.5 and other thresholds, and `samples`
    times at random, with one draw a value and one a stage and value by turns.

    `allowances` are the epsilons, tried in order. Graphs of more than `max_operations` are
    refused: the relaxation has a row for each operand of n (n - 1) / 2 slots.
    """

    allowances: Annotated[
        tuple[Share, ...],
        Field(min_length=1, max_length=100, description="1 to 100 shares, at least 0 and below 1"),
    ] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
    samples: Annotated[int, between(0, 10_000)] = 10
    seed: Seed = 0
    time_limit: Seconds = 300.0
    threads: Threads = 2
    max_operations: Annotated[int, between(1, 1_000_000)] = 400
    name = "lp_rounding"

    def run(self, task: Task) -> Solution:
        """The cheapest fitting rounding of the first allowance with one; the bound is the
        relaxation's. Raises `RematError` for a graph that is too large, `InfeasibleBudget`,
        `SolverTimeout` where the relaxation takes too long, and `SolverError` where HiGHS fails
        before a rounding fits."""
        graph, cancel = task.graph, task.cancel
        if len(graph) > self.max_operations:
            raise RematError(
                f"{self.name} relaxes a program that grows with the square of the graph, and takes "
                f"up to {self.max_operations} operations, not {len(graph)}: use Auto, or raise "
                "`max_operations`"
            )
        until = time.monotonic() + self.time_limit
        if task.budget_bytes is None:
            failures: list[SolverError] = []
            candidates = self._least(graph, until, cancel, failures)
            found = select_cheapest(Task(graph), candidates, strategy=self.name)
            return Solution(found.schedule, stats={**found.stats, **_told(failures)})
        return self._within(graph, task.budget_bytes, until, cancel)

    def _within(
        self, graph: Graph, budget_bytes: int, until: float, cancel: Cancel | None
    ) -> Solution:
        bound_s: float | None = None
        is_proved = False
        failures: list[SolverError] = []
        peaks_bytes: list[int] = []

        def best_of(candidates: Iterator[tuple[str, Schedule]]) -> Solution | None:
            try:
                return select_cheapest(Task(graph, budget_bytes), candidates, strategy=self.name)
            except InfeasibleBudget as error:
                peaks_bytes.append(error.min_feasible_bytes or 0)
                return None

        for allowance in self.allowances:
            room = budget_bytes - graph.constant_bytes
            limit = graph.constant_bytes + int(room * (1 - allowance))
            try:
                relaxed, least_s = self._relax(graph, limit, until, cancel)
            except SolverError as error:
                failures.append(error)
                break
            if relaxed is None:
                is_proved = bound_s is None and allowance == 0
                break
            if allowance == 0:  # of less room than was given it bounds nothing
                bound_s = least_s
            found = best_of(self._roundings(graph, relaxed, f"allowance {allowance:.0%}"))
            if found is not None:
                time_s = peak_and_time(graph, found.schedule)[1]
                is_best = bound_s is not None and time_s <= bound_s * (1 + 1e-9)
                return Solution(found.schedule, bound_s, "order", is_best, found.stats)
        # A rounding of the least relaxed peak may fit where none of the above did.
        found = best_of(self._least(graph, until, cancel, failures))
        if found is not None:
            stats = {**found.stats, **_told(failures)}
            return Solution(found.schedule, bound_s, "order", stats=stats)
        if failures:
            raise failures[0]
        reason = "no rounding of the relaxation fits, whatever the allowance"
        if is_proved:
            reason = "even the relaxation has no solution"
        raise infeasible(graph, budget_bytes, min(peaks_bytes), reason, proved=is_proved)

    def _least(
        self, graph: Graph, until: float, cancel: Cancel | None, failures: list[SolverError]
    ) -> Iterator[tuple[str, Schedule]]:
        """Roundings for a small peak, the least relaxed peak and a little more as the budget; ends
        where HiGHS fails."""
        yield "nothing dropped", Schedule.keep_all(graph)
        try:
            relaxed, least_bytes = self._relax(graph, None, until, cancel)
        except SolverError as error:
            failures.append(error)
            return
        assert relaxed is not None, "some budget is feasible"
        yield from self._roundings(graph, relaxed, "least relaxed peak")
        try:
            limit = graph.constant_bytes + math.ceil(least_bytes * (1 + _MORE))
            relaxed, _ = self._relax(graph, limit, until, cancel)
        except SolverTimeout:
            return
        except SolverError as error:
            failures.append(error)
            return
        if relaxed is not None:
            yield from self._roundings(graph, relaxed, f"least relaxed peak and {_MORE:.0%}")

    def _relax(
        self, graph: Graph, limit_bytes: int | None, until: float, cancel: Cancel | None
    ) -> tuple[MilpModel | None, float]:
        """The solved relaxation (None if it has no solution) with its least time in seconds or, if
        there is no limit, its least peak in bytes without constant memory."""
        relaxed = model.build(graph, slots.build_complete_slots(graph), limit_bytes)
        left = max(0.1, until - time.monotonic())
        is_cancelled = None if cancel is None else cancel.is_set
        highs = HighsSolver(gap=0.0, time_limit=left, threads=self.threads, is_cancelled=is_cancelled)
        try:
            answer = highs.solve(relaxed.arrays.relaxed())
        except SolverError as error:
            raise SolverError(f"{error}; use Auto") from None
        if answer.outcome is Outcome.INFEASIBLE:
            return None, 0.0
        if answer.outcome is not Outcome.OPTIMAL or answer.objective is None:
            raise SolverTimeout(
                f"the relaxation of {len(graph)} operations, {relaxed.rows:,} rows, was not solved "
                f"in {self.time_limit:g} s, or cancelled: raise `time_limit`, or use Auto"
            )
        unit = relaxed.unit_bytes if limit_bytes is None else relaxed.cost_unit_s
        return relaxed, answer.objective * unit

    def _roundings(
        self, graph: Graph, relaxed: MilpModel, where: str
    ) -> Iterator[tuple[str, Schedule]]:
        shares = retained_share_matrix(graph, relaxed)
        for threshold in _THRESHOLDS:
            yield f"{where}, threshold {threshold:g}", rounded(graph, shares > threshold)
        for sample in range(self.samples):
            random = np.random.default_rng((self.seed, sample))
            # One draw a value for all stages, or one for each: the paper's, which drops and makes
            # again what the other holds throughout.
            draw = random.random((1, shares.shape[1]) if sample % 2 else shares.shape)
            yield f"{where}, sample {sample}", rounded(graph, shares > np.minimum(draw, 0.999))


def _told(failures: list[SolverError]) -> Stats:
    return {"solver_error": str(failures[0])} if failures else {}
