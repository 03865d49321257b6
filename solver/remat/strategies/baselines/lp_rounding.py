"""Two-phase rounding of the linear relaxation.

Jain et al.: Checkmate (MLSys 2020), section 5: solve the relaxed program, round what it retains
(S), and recompute what is then missing, and only that (R). As the rounded schedule may exceed the
budget, the program gets (1 - epsilon) of it, for the smallest epsilon that works.

The relaxation of `remat.milp.model` over complete slots is used. It is tighter than the paper's,
and its optimum is a bound on every schedule of the order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout
from remat.graph import Graph
from remat.milp import model, slots
from remat.milp.model import MilpModel
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.outcome import SolverOutcome
from remat.progress import Cancel
from remat.schedule import Schedule, missing_operations
from remat.simulate import peak_and_time
from remat.solution import Solution, Stats
from remat.strategies.base import Task
from remat.strategies.baselines.schedule_builder import select_cheapest
from remat.strategies.infeasible import infeasible
from remat.strategies.option_types import Checked, Seconds, Seed, Share, Threads, between

Shares = npt.NDArray[np.float64]
"""Array [stage, value]: the share of a value that is retained when the stage of an operation
begins."""


def retained_share_matrix(graph: Graph, relaxed: MilpModel) -> Shares:
    """Return S of a solved relaxation over complete slots; values without a variable have 1."""
    current = np.zeros(len(graph.values))
    shares = np.zeros((len(graph) + 1, len(graph.values)))
    stage = 0
    for slot, op in enumerate(relaxed.slots.operations):
        operation = graph.operations[op]
        for v in (*operation.inputs, *operation.outputs):
            if v in graph.results or graph.values[v].size_bytes == 0:
                current[v] = 1.0
            else:
                retained = relaxed.retained[slot, v]
                current[v] = retained if isinstance(retained, int) else retained.varValue or 0.0
        if not relaxed.slots.is_optional[slot]:
            stage += 1
            shares[stage] = current
    return shares


def round_schedule(graph: Graph, is_retained: npt.NDArray[np.bool_]) -> Schedule:
    """Return the schedule that retains S = `is_retained` between stages and recomputes as little as
    that takes.

    Before each operation run what it misses, and what the next stage wants retained. Values that
    cannot be recomputed are retained for as long as anything reads them.
    """
    runs: list[int] = []
    is_permanent = [
        v in graph.results or not graph.operations[op].recomputable
        for v, op in enumerate(graph.producer)
    ]
    retained: set[int] = set()
    for op in range(len(graph)):
        after = {int(v) for v in np.flatnonzero(is_retained[op + 1])}
        after |= {v for v in range(len(graph.values)) if is_permanent[v]}
        before = {v for v in after if graph.producer[v] < op}
        required = (*graph.operations[op].inputs, *before)
        runs += [*missing_operations(graph, required, retained), op]
        retained = {v for v in after if graph.producer[v] <= op}
    return Schedule.of(runs)


_THRESHOLDS = (0.5, 0.25, 0.75)
_EXTRA_PEAK_SHARE = 0.2
"""If only the peak counts, the program retains and runs fractions; with this much more memory,
costs make its solution integral."""


@dataclass(frozen=True)
class LpRounding(Checked):
    """Checkmate's approximation: deterministic rounding at 0.5 and other thresholds, and `samples`
    random roundings, which sample a threshold per value and one per stage and value by turns.

    `allowances` are the epsilons, tried in order. Graphs of more than `max_operations` are refused:
    the relaxation has a row for each operand of n (n - 1) / 2 slots.
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
        """Return the cheapest rounding that fits, at the first allowance with one; the bound is the
        relaxation's.

        Raises `RematError` for a graph that is too large, `InfeasibleBudget`, `SolverTimeout` if
        the relaxation takes too long, and `SolverError` if HiGHS fails before a rounding fits.
        """
        graph, cancel = task.graph, task.cancel
        if len(graph) > self.max_operations:
            raise RematError(
                f"{self.name} relaxes a program that grows with the square of the graph, and takes "
                f"up to {self.max_operations} operations, not {len(graph)}: use Auto, or raise "
                "`max_operations`"
            )
        deadline = time.monotonic() + self.time_limit
        failures: list[SolverError] = []
        try:
            if task.budget_bytes is not None:
                return self._round_within_budget(
                    graph, task.budget_bytes, deadline, cancel, failures
                )
            candidates = self._small_peak_roundings(graph, deadline, cancel, failures)
            solution = select_cheapest(Task(graph), candidates, strategy=self.name)
            return Solution(solution.schedule, stats={**solution.stats, **_failure_stats(failures)})
        finally:
            failures.clear()  # their tracebacks have this frame: a reference cycle

    def _round_within_budget(
        self,
        graph: Graph,
        budget_bytes: int,
        deadline: float,
        cancel: Cancel | None,
        failures: list[SolverError],
    ) -> Solution:
        """Return the cheapest rounding that fits. Errors of HiGHS are added to `failures`."""
        bound_s: float | None = None
        is_proved = False
        peaks_bytes: list[int] = []

        def best_rounding(candidates: Iterator[tuple[str, Schedule]]) -> Solution | None:
            try:
                return select_cheapest(Task(graph, budget_bytes), candidates, strategy=self.name)
            except InfeasibleBudget as error:
                peaks_bytes.append(error.min_feasible_bytes or 0)
                return None

        for allowance in self.allowances:
            available_bytes = budget_bytes - graph.constant_bytes
            limit = graph.constant_bytes + int(available_bytes * (1 - allowance))
            try:
                relaxed, relaxed_time_s = self._relax(graph, limit, deadline, cancel)
            except SolverError as error:
                failures.append(error)
                break
            if relaxed is None:
                is_proved = bound_s is None and allowance == 0
                break
            if allowance == 0:  # with less memory than the budget it bounds nothing
                bound_s = relaxed_time_s
            solution = best_rounding(self._roundings(graph, relaxed, f"allowance {allowance:.0%}"))
            if solution is not None:
                time_s = peak_and_time(graph, solution.schedule)[1]
                is_best = bound_s is not None and time_s <= bound_s * (1 + 1e-9)
                return Solution(solution.schedule, bound_s, "order", is_best, solution.stats)
        # A rounding of the smallest relaxed peak may fit where none of the above did.
        solution = best_rounding(self._small_peak_roundings(graph, deadline, cancel, failures))
        if solution is not None:
            stats = {**solution.stats, **_failure_stats(failures)}
            return Solution(solution.schedule, bound_s, "order", stats=stats)
        if failures:
            raise failures[0]
        reason = "no rounding of the relaxation fits, whatever the allowance"
        if is_proved:
            reason = "even the relaxation has no solution"
        raise infeasible(graph, budget_bytes, min(peaks_bytes), reason, proved=is_proved)

    def _small_peak_roundings(
        self, graph: Graph, deadline: float, cancel: Cancel | None, failures: list[SolverError]
    ) -> Iterator[tuple[str, Schedule]]:
        """Yield roundings for a small peak, with the smallest relaxed peak and a little more as the
        budget; ends if HiGHS fails."""
        yield "nothing dropped", Schedule.keep_all(graph)
        try:
            relaxed, relaxed_peak_bytes = self._relax(graph, None, deadline, cancel)
        except SolverError as error:
            failures.append(error)
            return
        assert relaxed is not None, "some budget is feasible"
        yield from self._roundings(graph, relaxed, "least relaxed peak")
        try:
            limit = graph.constant_bytes + math.ceil(relaxed_peak_bytes * (1 + _EXTRA_PEAK_SHARE))
            relaxed, _ = self._relax(graph, limit, deadline, cancel)
        except SolverTimeout:
            return
        except SolverError as error:
            failures.append(error)
            return
        if relaxed is not None:
            yield from self._roundings(
                graph, relaxed, f"least relaxed peak and {_EXTRA_PEAK_SHARE:.0%}"
            )

    def _relax(
        self, graph: Graph, limit_bytes: int | None, deadline: float, cancel: Cancel | None
    ) -> tuple[MilpModel | None, float]:
        """Return the solved relaxation (None if it has no solution) with its time in seconds or,
        without a limit, its peak in bytes without constant memory."""
        relaxed = model.build(graph, slots.build_complete_slots(graph), limit_bytes)
        remaining_s = max(0.1, deadline - time.monotonic())
        is_cancelled = None if cancel is None else cancel.is_set
        highs = HighsSolver(
            gap=0.0, time_limit=remaining_s, threads=self.threads, is_cancelled=is_cancelled
        )
        try:
            answer = highs.solve(relaxed.arrays.relaxed())
        except SolverError as error:
            raise SolverError(f"{error}; use Auto") from None
        if answer.outcome is SolverOutcome.INFEASIBLE:
            return None, 0.0
        if answer.outcome is not SolverOutcome.OPTIMAL or answer.objective is None:
            raise SolverTimeout(
                f"the relaxation of {len(graph)} operations, {relaxed.rows:,} rows, was not solved "
                f"in {self.time_limit:g} s, or cancelled: raise `time_limit`, or use Auto"
            )
        unit = relaxed.unit_bytes if limit_bytes is None else relaxed.cost_unit_s
        return relaxed, answer.objective * unit

    def _roundings(
        self, graph: Graph, relaxed: MilpModel, budget_text: str
    ) -> Iterator[tuple[str, Schedule]]:
        shares = retained_share_matrix(graph, relaxed)
        for threshold in _THRESHOLDS:
            yield (
                f"{budget_text}, threshold {threshold:g}",
                round_schedule(graph, shares > threshold),
            )
        for sample in range(self.samples):
            random = np.random.default_rng((self.seed, sample))
            # One sample per value for all stages, or one for each: the paper's, which drops and
            # recomputes what the other retains throughout.
            thresholds = random.random((1, shares.shape[1]) if sample % 2 else shares.shape)
            yield (
                f"{budget_text}, sample {sample}",
                round_schedule(graph, shares > np.minimum(thresholds, 0.999)),
            )


def _failure_stats(failures: list[SolverError]) -> Stats:
    return {"solver_error": str(failures[0])} if failures else {}
