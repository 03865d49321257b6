"""Checkmate as published, for reference: the optimum by its program, and its approximation, the
two-phase rounding of a linear relaxation.

Jain et al.: Checkmate: breaking the memory wall with optimal tensor rematerialization (MLSys 2020).
The program, `CheckmateModel`, is equations 1 to 9, with frontier-advancing stages: in stage t,
operations 0 to t - 1 may be recomputed, then t runs for the first time. All variables but U are
binary:

    R[t,k]    operation k runs in stage t
    S[t,i]    value i is retained when stage t begins
    F[t,i,k]  value i is freed after k in stage t (FREE)
    U[t,k]    bytes retained before k in stage t, constant memory excluded

Minimise the sum of cost_k R[t,k] subject to
    R[t,k] <= R[t,producer(i)] + S[t,i]     i an input of k                           (1b)
    S[t+1,i] <= R[t,producer(i)] + S[t,i]                                             (1c)
    R[t,t] = 1,  R[t,k] = 0 for k > t,  S[t,i] = 0 for i not yet produced             (8)
    U[t,0] = sum_i size_i S[t,i]                                                      (2)
    U[t,k+1] = U[t,k] + R[t,k] output bytes - sum_i size_i F[t,i,k]                   (3)
    U[t,k] + R[t,k] (output bytes + workspace) - sum_i size_i F[t,i,k] <= budget      (4)
    F[t,i,k] = 1 iff R[t,k] = 1, S[t+1,i] = 0 and no later reader of i runs in t      (5 to 7)

It departs from the paper where the simulator does: an operation may have several outputs, workspace
counts while it runs, a result is retained from its first production on, and a recomputed copy of it
is freed right after its run.

The approximation, `LpRounding`, is section 5: solve the relaxed program, round what it retains (S),
and recompute what is then missing, and only that (R). As the rounded schedule may exceed the
budget, the program gets (1 - epsilon) of it, for the smallest epsilon that works. The relaxation of
`remat.milp.model` over complete slots is used. It is tighter than the paper's, and its optimum is a
bound on every schedule of the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverTimeout
from remat.graph import Graph
from remat.milp import slots
from remat.milp.model import MilpModel
from remat.milp.solvers.highs import TIGHT_TOLERANCES, HighsSolver
from remat.milp.solvers.program import (
    AT_MOST,
    EQUAL,
    Column,
    Program,
    ProgramArrays,
    SolverOutcome,
    SolverRun,
    Term,
    cost_unit_s,
    size_unit_bytes,
    value_of,
)
from remat.progress import Clock
from remat.schedule import Schedule, missing_operations
from remat.simulate import peak_and_time
from remat.solution import Solution, Stats
from remat.strategies.base import Task, infeasible
from remat.strategies.baselines.schedule_builder import select_cheapest
from remat.strategies.option_types import Checked, Seconds, Seed, Share, Threads, between


class CheckmateModel:
    """The rows, built on construction; bytes are divided by a power of two, so none is rounded.

    `program` is for a solver; `schedule` and `bound_in_units` read its solution.
    """

    def __init__(self, graph: Graph, budget_bytes: int | None) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        scale_bytes = budget_bytes or sum(value.size_bytes for value in graph.values)
        self.unit_bytes = size_unit_bytes(scale_bytes)
        self.sizes = [value.size_bytes / self.unit_bytes for value in graph.values]
        self.program = Program()
        self.available: float | Column = (
            self.program.add_column("b")
            if budget_bytes is None
            else (budget_bytes - graph.constant_bytes) / self.unit_bytes
        )
        count = len(graph)
        self.runs = [[self._run_term(t, k) for k in range(t + 1)] for t in range(count)]
        self.retained = [
            [self._retained_term(t, i) for i in range(len(graph.values))] for t in range(count + 1)
        ]
        for t in range(count):
            self._add_dependency_rows(t)
            self._add_memory_rows(t)
        if isinstance(self.available, Column):
            self.program.costs = {self.available: 1.0}
        else:
            unit_s = cost_unit_s(graph)
            self.program.costs = {
                run: graph.operations[k].cost_s / unit_s
                for row in self.runs
                for k, run in enumerate(row)
                if isinstance(run, Column)
            }
            self.program.offset = graph.total_cost_s / unit_s

    def schedule(self) -> Schedule:
        """Return the schedule of R, read row by row."""
        return Schedule.of(
            k for row in self.runs for k, run in enumerate(row) if value_of(run) > 0.5
        )

    def bound_in_units(self, bound: float) -> float:
        """Convert a bound on the objective to seconds, or to bytes with constant memory."""
        if self.budget_bytes is None:
            return bound * self.unit_bytes + self.graph.constant_bytes
        return bound * cost_unit_s(self.graph)

    def _add_dependency_rows(self, t: int) -> None:
        for k, run in enumerate(self.runs[t]):
            for i in self.graph.operations[k].inputs:
                producer_run = self.runs[t][self.graph.producer[i]]
                self._add_at_most_row([(1, run), (-1, producer_run), (-1, self.retained[t][i])], 0)
        for i, producer in enumerate(self.graph.producer):
            if producer <= t:
                producer_run = self.runs[t][producer]
                self._add_at_most_row(
                    [(1, self.retained[t + 1][i]), (-1, producer_run), (-1, self.retained[t][i])], 0
                )

    def _add_memory_rows(self, t: int) -> None:
        live: list[tuple[float, Term]] = [
            (size, self.retained[t][i]) for i, size in enumerate(self.sizes)
        ]
        for k, run in enumerate(self.runs[t]):
            operation = self.graph.operations[k]
            output_bytes = sum(self.sizes[i] for i in operation.outputs)
            workspace = operation.workspace_bytes / self.unit_bytes
            need = [*live, (output_bytes + workspace, run)]
            if k == t:  # operations that overwrite run once
                need += [
                    (-self.sizes[i], self._free_variable(t, i, k)) for i in operation.overwrites
                ]
            if isinstance(self.available, Column):
                self._add_at_most_row([*need, (-1, self.available)], 0)
            else:
                self._add_at_most_row(need, self.available)
            if k == t:
                return
            live_after = self.program.add_column(f"u_{t}_{k + 1}")
            # A result was produced before: the copy that k produces here is freed right after.
            retained_bytes = sum(
                self.sizes[i] for i in operation.outputs if i not in self.graph.results
            )
            terms = [*live, (retained_bytes, run)]
            for i in (*operation.inputs, *operation.outputs):
                if i not in self.graph.results and self.sizes[i] > 0:
                    terms.append((-self.sizes[i], self._free_variable(t, i, k)))
            self.program.add_terms([*terms, (-1, live_after)], EQUAL, 0.0)
            live = [(1, live_after)]

    def _free_variable(self, t: int, i: int, k: int) -> Column:
        free = self.program.add_binary(f"f_{t}_{i}_{k}")
        readers = [self.runs[t][j] for j in self.graph.consumers[i] if k < j <= t]
        hazards: list[tuple[float, Term]] = [
            (-1, self.runs[t][k]),
            (1, self.retained[t + 1][i]),
            *((1, reader) for reader in readers),
        ]
        # hazards + 1 counts the reasons not to free: 1 - F <= that <= (their number) (1 - F).
        self._add_at_most_row([(-1, free), *((-c, x) for c, x in hazards)], 0)
        reasons = len(readers) + 2
        self._add_at_most_row([*hazards, (reasons, free)], reasons - 1)
        return free

    def _run_term(self, t: int, k: int) -> Term:
        if k == t:
            return 1
        if not self.graph.operations[k].recomputable:
            return 0
        return self.program.add_binary(f"r_{t}_{k}")

    def _retained_term(self, t: int, i: int) -> Term:
        if self.graph.producer[i] >= t:
            return 0
        if i in self.graph.results:
            return 1
        if t == len(self.graph):
            return 0
        return self.program.add_binary(f"s_{t}_{i}")

    def _add_at_most_row(self, terms: list[tuple[float, Term]], rhs: float) -> None:
        self.program.add_terms(terms, AT_MOST, rhs)


def _check_operation_count(strategy: CheckmateMilp | LpRounding, graph: Graph, reason: str) -> None:
    """Raise `RematError` for a graph that is too large for a published program; `reason` says what
    is large in it."""
    if len(graph) > strategy.max_operations:
        raise RematError(
            f"{strategy.name} {reason}, and takes up to {strategy.max_operations} operations, not "
            f"{len(graph)}: use Auto, or raise `max_operations`"
        )


def _run_published_program(
    program: ProgramArrays,
    clock: Clock,
    threads: int,
    *,
    gap: float = 0.0,
    seed: int = 0,
    options: Mapping[str, float] | None = None,
) -> SolverRun:
    """Return the run of HiGHS within the time of the clock. Its errors advise to use Auto."""
    highs = HighsSolver(
        gap=gap,
        time_limit=max(0.1, clock.remaining_s),
        threads=threads,
        seed=seed,
        is_cancelled=clock.is_cancelled,
        options=options,
    )
    try:
        return highs.run(program)
    except SolverError as error:
        raise SolverError(f"{error}; use Auto") from None


_MAX_ATTEMPTS = 5


@dataclass(frozen=True)
class CheckmateMilp(Checked):
    """The optimum over every schedule of the order, by the published program. Equivalent to
    `Exact`, which finds it sooner.

    `time_limit` is for all programs together, except for the one that finds the smallest peak if
    the budget is infeasible: it has the same limit.
    """

    gap: Share = 0.0
    time_limit: Seconds = 300.0
    threads: Threads = 2
    seed: Seed = 0
    max_operations: Annotated[int, between(1, 1_000_000)] = 80
    name = "checkmate"

    def run(self, task: Task) -> Solution:
        """Return the cheapest schedule within the budget, or the one with the smallest peak. Raises
        `RematError` for a graph that is too large, `InfeasibleBudget`, `SolverTimeout`, and
        `SolverError` if HiGHS fails and retaining everything does not fit."""
        graph, budget_bytes, cancel = task.graph, task.budget_bytes, task.cancel
        _check_operation_count(self, graph, "is the published program with three binaries a pair")
        bound: float | None = None
        limit = budget_bytes
        clock = Clock.of(self.time_limit, cancel)
        for attempt in range(_MAX_ATTEMPTS):
            program = CheckmateModel(graph, limit)
            try:
                answer = _run_published_program(
                    program.program.arrays(),
                    clock,
                    self.threads,
                    gap=self.gap,
                    seed=self.seed,
                    options=TIGHT_TOLERANCES if attempt else None,
                )
            except SolverError as error:
                keep_all = Schedule.keep_all(graph)
                if budget_bytes is not None and peak_and_time(graph, keep_all)[0] > budget_bytes:
                    raise
                return Solution(keep_all, stats={"solver_error": str(error)})
            if answer.outcome is SolverOutcome.INFEASIBLE and budget_bytes is not None:
                smallest = self.run(Task(graph, cancel=cancel)).schedule
                smallest_bytes, _ = peak_and_time(graph, smallest)
                reason = "no schedule of this order of the operations fits"
                raise infeasible(graph, budget_bytes, smallest_bytes, reason, proved=attempt == 0)
            if answer.objective is None:
                raise SolverTimeout(
                    f"no schedule was found in {self.time_limit:g} s: raise `time_limit`, or use "
                    "Auto"
                )
            if attempt == 0 and answer.bound is not None:
                bound = program.bound_in_units(answer.bound)
            schedule = program.schedule()
            peak_bytes, _ = peak_and_time(graph, schedule)
            excess_bytes = 0 if budget_bytes is None else peak_bytes - budget_bytes
            if limit is None or budget_bytes is None or excess_bytes <= 0:
                is_proved = answer.outcome is SolverOutcome.OPTIMAL and attempt == 0
                stats: dict[str, str | int | float] = {
                    "solver": "HiGHS",
                    "columns": len(program.program.columns),
                    "nodes": answer.nodes,
                    "solver_s": answer.seconds,
                }
                return Solution(schedule, bound, "order", is_proved, stats)
            # HiGHS's tolerance allowed it: retry with a smaller tolerance, then with a smaller
            # budget.
            limit -= excess_bytes if attempt else 0
        raise SolverError(f"HiGHS exceeds the budget by its tolerance, {_MAX_ATTEMPTS} times")


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
                current[v] = value_of(relaxed.retained[slot, v])
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
        graph = task.graph
        _check_operation_count(
            self, graph, "relaxes a program that grows with the square of the graph"
        )
        clock = Clock.of(self.time_limit, task.cancel)
        failures: list[SolverError] = []
        try:
            if task.budget_bytes is not None:
                return self._round_within_budget(graph, task.budget_bytes, clock, failures)
            candidates = self._small_peak_roundings(graph, clock, failures)
            solution = select_cheapest(Task(graph), candidates, strategy=self.name)
            return Solution(solution.schedule, stats={**solution.stats, **_failure_stats(failures)})
        finally:
            failures.clear()  # their tracebacks have this frame: a reference cycle

    def _round_within_budget(
        self,
        graph: Graph,
        budget_bytes: int,
        clock: Clock,
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
                relaxed, relaxed_time_s = self._solved_relaxation(graph, limit, clock)
            except SolverError as error:
                failures.append(error)
                break
            if relaxed is None:
                is_proved = bound_s is None and allowance == 0
                break
            if allowance == 0:  # with less memory than the budget it bounds nothing
                bound_s = relaxed_time_s
            solution = best_rounding(
                self._roundings_of_relaxation(graph, relaxed, f"allowance {allowance:.0%}")
            )
            if solution is not None:
                time_s = peak_and_time(graph, solution.schedule)[1]
                is_best = bound_s is not None and time_s <= bound_s * (1 + 1e-9)
                return Solution(solution.schedule, bound_s, "order", is_best, solution.stats)
        # A rounding of the smallest relaxed peak may fit where none of the above did.
        solution = best_rounding(self._small_peak_roundings(graph, clock, failures))
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
        self, graph: Graph, clock: Clock, failures: list[SolverError]
    ) -> Iterator[tuple[str, Schedule]]:
        """Yield roundings for a small peak, with the smallest relaxed peak and a little more as the
        budget; ends if HiGHS fails."""
        yield "nothing dropped", Schedule.keep_all(graph)
        try:
            relaxed, relaxed_peak_bytes = self._solved_relaxation(graph, None, clock)
        except SolverError as error:
            failures.append(error)
            return
        assert relaxed is not None, "some budget is feasible"
        yield from self._roundings_of_relaxation(graph, relaxed, "least relaxed peak")
        try:
            limit = graph.constant_bytes + math.ceil(relaxed_peak_bytes * (1 + _EXTRA_PEAK_SHARE))
            relaxed, _ = self._solved_relaxation(graph, limit, clock)
        except SolverTimeout:
            return
        except SolverError as error:
            failures.append(error)
            return
        if relaxed is not None:
            yield from self._roundings_of_relaxation(
                graph, relaxed, f"least relaxed peak and {_EXTRA_PEAK_SHARE:.0%}"
            )

    def _solved_relaxation(
        self, graph: Graph, limit_bytes: int | None, clock: Clock
    ) -> tuple[MilpModel | None, float]:
        """Return the solved relaxation (None if it has no solution) with its time in seconds or,
        without a limit, its peak in bytes without constant memory."""
        relaxed = MilpModel(graph, slots.build_complete_slots(graph), limit_bytes)
        answer = _run_published_program(relaxed.arrays.relaxed(), clock, self.threads)
        if answer.outcome is SolverOutcome.INFEASIBLE:
            return None, 0.0
        if answer.outcome is not SolverOutcome.OPTIMAL or answer.objective is None:
            raise SolverTimeout(
                f"the relaxation of {len(graph)} operations, {len(relaxed.program.rows):,} rows, "
                f"was not solved in {self.time_limit:g} s, or cancelled: raise `time_limit`, or "
                "use Auto"
            )
        unit = relaxed.unit_bytes if limit_bytes is None else relaxed.cost_unit_s
        return relaxed, answer.objective * unit

    def _roundings_of_relaxation(
        self, graph: Graph, relaxed: MilpModel, budget_text: str
    ) -> Iterator[tuple[str, Schedule]]:
        """Yield schedules that retain what a solved relaxation retains above a threshold, for fixed
        and for random thresholds, with the choice as text."""
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
    """Return the statistics with the first error of HiGHS; none without errors."""
    return {"solver_error": str(failures[0])} if failures else {}
