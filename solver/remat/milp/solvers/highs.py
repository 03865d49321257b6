"""HiGHS by its own package, with what PuLP's adapter leaves out.

The program goes over as arrays in one call instead of row by row, and what HiGHS knows comes back:
dual bound, nodes, its own model status. Takes an incumbent to start from, reports progress, and can
be interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import highspy
import numpy as np
import pulp

from remat.errors import SolverError
from remat.milp.solvers.outcome import Outcome, SolverRun
from remat.milp.solvers.pulp_versions import Arrays

Report = Callable[[float | None, float | None], None]
"""Called with (incumbent objective, dual bound); None where there is none."""


EXACT = {"mip_feasibility_tolerance": 1e-10, "primal_feasibility_tolerance": 1e-10}
"""HiGHS's smallest tolerances: a budget of 10 GB may be missed by bytes, where it usually may by
kilobytes."""


@dataclass(frozen=True, kw_only=True)
class BulkHiGHS:
    """How to solve a program.

    `start` maps variables to values of an incumbent, which may leave out the continuous ones;
    `target` ends the solve at the first solution with an objective of at most that.
    """

    gap: float
    time_limit: float
    threads: int
    seed: int = 0
    start: Mapping[pulp.LpVariable, float] | None = None
    target: float | None = None
    report: Report | None = None
    cancelled: Callable[[], bool] | None = None
    options: Mapping[str, str | int | float | bool] | None = None

    def solve(self, program: Arrays) -> SolverRun:
        """Solve it, and give its variables the values found, if any. Raises `SolverError` where
        HiGHS refuses to run, or ends without an answer."""
        if not program.variables:
            return _without_columns(program)
        highs = _Silent()
        self._set_options(highs)
        load(highs, program)
        if self.start:
            columns = {v: i for i, v in enumerate(program.variables)}
            known = [(columns[v], x) for v, x in self.start.items() if v in columns]
            highs.setSolution(
                len(known),
                np.array([i for i, _ in known], dtype=np.int32),
                np.array([x for _, x in known], dtype=np.float64),
            )
        raised = self._listen(highs)
        status = highs.run()
        if status == highspy.HighsStatus.kError and not raised:
            # A process has one pool of HiGHS threads, and another solve has sized it differently.
            highs.setOptionValue("threads", 0)
            status = highs.run()
        if raised:
            raise raised[0]
        if status == highspy.HighsStatus.kError:
            raise SolverError(
                "HiGHS refused to run the program; most likely the graph's sizes are too far "
                "from its budget, or its costs from each other"
            )
        return _read(highs, program)

    def _set_options(self, highs: highspy.Highs) -> None:
        options: dict[str, str | int | float | bool] = {
            "mip_rel_gap": self.gap,
            "mip_abs_gap": 1e-9,
            "time_limit": max(0.0, self.time_limit),
            "threads": self.threads,
            "random_seed": self.seed,
            **(self.options or {}),
        }
        if self.target is not None:
            options["objective_target"] = self.target
        for name, value in options.items():
            highs.setOptionValue(name, value)

    def _listen(self, highs: highspy.Highs) -> list[BaseException]:
        """Subscribe to what HiGHS tells. What is raised then ends the run, and is put into the
        list, as HiGHS 1.16 takes it for an error of its own."""
        raised: list[BaseException] = []

        def poll(event: highspy.HighsCallbackEvent) -> None:
            try:
                if raised or (self.cancelled is not None and self.cancelled()):
                    event.interrupt()
            except BaseException as error:
                raised.append(error)
                event.interrupt()

        def tell(event: highspy.HighsCallbackEvent) -> None:
            data = event.data_out
            try:
                if self.report is not None and not raised:
                    self.report(_finite(data.mip_primal_bound), _finite(data.mip_dual_bound))
            except BaseException as error:
                raised.append(error)

        if self.cancelled is not None or self.report is not None:
            highs.cbSimplexInterrupt.subscribe(poll)
            highs.cbIpmInterrupt.subscribe(poll)
            highs.cbMipInterrupt.subscribe(poll)
        if self.report is not None:
            highs.cbMipLogging.subscribe(tell)
            highs.cbMipImprovingSolution.subscribe(tell)
        return raised


class _Silent(highspy.Highs):
    """Says nothing. From 1.16 on the first of a process names itself on stdout as it enables its
    callbacks, which it does when it is made; only an option set before hushes that."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def load(highs: highspy.Highs, program: Arrays) -> None:
    """Pass the program over."""
    model = highspy.HighsLp()
    model.num_col_ = len(program.variables)
    model.num_row_ = len(program.rhs)
    model.col_cost_ = program.costs
    model.offset_ = program.offset
    model.col_lower_ = program.lower
    model.col_upper_ = program.upper
    model.row_lower_ = np.where(program.senses == pulp.LpConstraintLE, -np.inf, program.rhs)
    model.row_upper_ = np.where(program.senses == pulp.LpConstraintGE, np.inf, program.rhs)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.starts
    model.a_matrix_.index_ = program.indices
    model.a_matrix_.value_ = program.coefficients
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[is_integer] for is_integer in program.is_integer.tolist()]
    highs.passModel(model)  # a program that it does not take it does not run


def _read(highs: highspy.Highs, program: Arrays) -> SolverRun:
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kNotset:
        raise SolverError("HiGHS stopped without an answer")
    info = highs.getInfo()
    solved = info.primal_solution_status == 2  # kSolutionStatusFeasible
    if solved:
        values = highs.getSolution().col_value
        for variable, value in zip(program.variables, values, strict=True):
            variable.varValue = value
    is_mip = bool(program.is_integer.any())
    objective = info.objective_function_value if solved else None
    optimal = status == highspy.HighsModelStatus.kOptimal
    if optimal:
        outcome = Outcome.OPTIMAL
    elif status == highspy.HighsModelStatus.kInfeasible:
        outcome = Outcome.INFEASIBLE
    else:
        outcome = Outcome.FEASIBLE if solved else Outcome.UNKNOWN
    return SolverRun(
        outcome=outcome,
        schedule=None,
        objective=objective,
        bound=_finite(info.mip_dual_bound) if is_mip else (objective if optimal else None),
        nodes=max(0, int(info.mip_node_count)) if is_mip else 0,
        seconds=highs.getRunTime(),
        message=highs.modelStatusToString(status),
    )


def _without_columns(program: Arrays) -> SolverRun:
    """HiGHS calls such a program empty and looks no further."""
    is_equal = program.senses == pulp.LpConstraintEQ
    is_met = np.where(is_equal, program.rhs == 0, program.senses * program.rhs <= 0).all()
    if is_met:
        return SolverRun(Outcome.OPTIMAL, None, program.offset, program.offset, 0, 0.0, "Empty")
    return SolverRun(Outcome.INFEASIBLE, None, None, None, 0, 0.0, "Empty")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) and abs(number) < 1e100 else None
