"""The optimum by Checkmate's program as published, for reference.

Jain et al.: Checkmate: breaking the memory wall with optimal tensor rematerialization (MLSys
2020), section 4; the program is in `remat.strategies.baselines.published_milp.checkmate_program`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from remat.errors import RematError, SolverError, SolverTimeout
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import TIGHT_TOLERANCES, HighsSolver
from remat.milp.solvers.outcome import SolverOutcome, SolverRun
from remat.progress import Cancel
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.baselines.published_milp.checkmate_program import CheckmateModel
from remat.strategies.infeasible import infeasible
from remat.strategies.option_types import Checked, Seconds, Seed, Share, Threads, between

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
        if len(graph) > self.max_operations:
            raise RematError(
                f"{self.name} is the published program with three binaries a pair, and takes up "
                f"to {self.max_operations} operations, not {len(graph)}: use Auto, or raise "
                "`max_operations`"
            )
        bound: float | None = None
        limit = budget_bytes
        deadline = time.monotonic() + self.time_limit
        for attempt in range(_MAX_ATTEMPTS):
            program = CheckmateModel(graph, limit)
            try:
                left_s = max(0.1, deadline - time.monotonic())
                answer = self._solve(program, cancel, left_s, TIGHT_TOLERANCES if attempt else None)
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
                    "columns": len(program.problem.variables()),
                    "nodes": answer.nodes,
                    "solver_s": answer.seconds,
                }
                return Solution(schedule, bound, "order", is_proved, stats)
            # HiGHS's tolerance allowed it: retry with a smaller tolerance, then with a smaller
            # budget.
            limit -= excess_bytes if attempt else 0
        raise SolverError(f"HiGHS exceeds the budget by its tolerance, {_MAX_ATTEMPTS} times")

    def _solve(
        self,
        program: CheckmateModel,
        cancel: Cancel | None,
        time_limit: float,
        options: Mapping[str, float] | None,
    ) -> SolverRun:
        highs = HighsSolver(
            gap=self.gap,
            time_limit=time_limit,
            threads=self.threads,
            seed=self.seed,
            is_cancelled=None if cancel is None else cancel.is_set,
            options=options,
        )
        try:
            return highs.solve(pulp_versions.read_arrays(program.problem))
        except SolverError as error:
            raise SolverError(f"{error}; use Auto") from None
