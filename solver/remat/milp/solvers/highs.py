"""HiGHS through its own package, with what PuLP's adapter leaves out.

The program is passed as arrays in one call instead of row by row, and the answer has the dual
bound, the nodes and HiGHS's own model status. HiGHS starts from an incumbent, reports progress, and
can be interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import highspy
import numpy as np

from remat.errors import SolverError
from remat.milp.solvers.program import (
    AT_LEAST,
    AT_MOST,
    EQUAL,
    Column,
    ProgramArrays,
    SolverOutcome,
    SolverRun,
)

BoundsCallback = Callable[[float | None, float | None], None]
"""Function (incumbent objective, dual bound) that is called during a run; None for what is unknown.
"""


TIGHT_TOLERANCES = {"mip_feasibility_tolerance": 1e-10, "primal_feasibility_tolerance": 1e-10}
"""HiGHS's smallest tolerances: they violate a budget of 10 GB by bytes, the defaults by kilobytes.
"""


@dataclass(frozen=True, kw_only=True)
class HighsSolver:
    """HiGHS with its options for one solve.

    `start` maps columns to the values of an incumbent, which may leave out the continuous ones.
    `target` ends the solve at the first solution with an objective of at most that.
    """

    gap: float
    time_limit: float
    threads: int
    seed: int = 0
    start: Mapping[Column, float] | None = None
    target: float | None = None
    report: BoundsCallback | None = None
    is_cancelled: Callable[[], bool] | None = None
    options: Mapping[str, str | int | float | bool] | None = None

    def run(self, program: ProgramArrays) -> SolverRun:
        """Solve the program, and set the values of its columns to the solution, if any.

        Raises `SolverError` if HiGHS refuses to run, or ends without an answer.
        """
        if not program.columns:
            return _run_without_columns(program)
        highs = _SilentHighs()
        self._set_options(highs)
        load_program(highs, program)
        if self.start:
            columns = {v: i for i, v in enumerate(program.columns)}
            entries = [(columns[v], x) for v, x in self.start.items() if v in columns]
            highs.setSolution(
                len(entries),
                np.array([i for i, _ in entries], dtype=np.int32),
                np.array([x for _, x in entries], dtype=np.float64),
            )
        callback_errors = self._subscribe_callbacks(highs)
        status = highs.run()
        if status == highspy.HighsStatus.kError and not callback_errors:
            # A process has one pool of HiGHS threads, and another solve has set its size
            # differently.
            highs.setOptionValue("threads", 0)
            status = highs.run()
        if callback_errors:
            raise callback_errors.pop()  # no cycle of the error, its traceback and this frame
        if status == highspy.HighsStatus.kError:
            raise SolverError(
                "HiGHS refused to run the program; most likely the graph's sizes are too far "
                "from its budget, or its costs from each other"
            )
        return _read_answer(highs, program)

    def _set_options(self, highs: highspy.Highs) -> None:
        """Set HiGHS's options from the fields."""
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

    def _subscribe_callbacks(self, highs: highspy.Highs) -> list[BaseException]:
        """Subscribe to HiGHS's callbacks for progress and interruption, and return the list of
        their errors.

        An exception in a callback ends the run and is appended to this list: HiGHS 1.16 would take
        it for an error of its own.
        """
        callback_errors: list[BaseException] = []

        def interrupt_if_cancelled(event: highspy.HighsCallbackEvent) -> None:
            try:
                if callback_errors or (self.is_cancelled is not None and self.is_cancelled()):
                    event.interrupt()
            except BaseException as error:
                callback_errors.append(error)
                event.interrupt()

        def forward_progress(event: highspy.HighsCallbackEvent) -> None:
            data = event.data_out
            try:
                if self.report is not None and not callback_errors:
                    self.report(
                        _finite_or_none(data.mip_primal_bound), _finite_or_none(data.mip_dual_bound)
                    )
            except BaseException as error:
                callback_errors.append(error)

        if self.is_cancelled is not None or self.report is not None:
            highs.cbSimplexInterrupt.subscribe(interrupt_if_cancelled)
            highs.cbIpmInterrupt.subscribe(interrupt_if_cancelled)
            highs.cbMipInterrupt.subscribe(interrupt_if_cancelled)
        if self.report is not None:
            highs.cbMipLogging.subscribe(forward_progress)
            highs.cbMipImprovingSolution.subscribe(forward_progress)
        return callback_errors


class _SilentHighs(highspy.Highs):
    """HiGHS without output. From 1.16 on the first instance of a process prints its name as it
    enables its callbacks in its constructor; only an option that is set before prevents that."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def load_program(highs: highspy.Highs, program: ProgramArrays) -> None:
    """Pass the program to HiGHS."""
    model = highspy.HighsLp()
    model.num_col_ = len(program.columns)
    model.num_row_ = len(program.rhs)
    model.col_cost_ = program.costs
    model.offset_ = program.offset
    model.col_lower_ = program.lower
    model.col_upper_ = program.upper
    model.row_lower_ = np.where(program.senses == AT_MOST, -np.inf, program.rhs)
    model.row_upper_ = np.where(program.senses == AT_LEAST, np.inf, program.rhs)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.starts
    model.a_matrix_.index_ = program.indices
    model.a_matrix_.value_ = program.coefficients
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[is_integer] for is_integer in program.is_integer.tolist()]
    highs.passModel(model)  # a program that it rejects is reported by `run`


def _read_answer(highs: highspy.Highs, program: ProgramArrays) -> SolverRun:
    """Return HiGHS's answer, and set the values of the columns if it has a solution. Raises
    `SolverError` if it has no answer."""
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kNotset:
        raise SolverError("HiGHS stopped without an answer")
    info = highs.getInfo()
    has_solution = info.primal_solution_status == 2  # kSolutionStatusFeasible
    if has_solution:
        values = highs.getSolution().col_value
        for column, value in zip(program.columns, values, strict=True):
            column.value = value
    is_mip = bool(program.is_integer.any())
    objective = info.objective_function_value if has_solution else None
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    if is_optimal:
        outcome = SolverOutcome.OPTIMAL
    elif status == highspy.HighsModelStatus.kInfeasible:
        outcome = SolverOutcome.INFEASIBLE
    else:
        outcome = SolverOutcome.FEASIBLE if has_solution else SolverOutcome.UNKNOWN
    return SolverRun(
        outcome=outcome,
        schedule=None,
        objective=objective,
        bound=_finite_or_none(info.mip_dual_bound)
        if is_mip
        else (objective if is_optimal else None),
        nodes=max(0, int(info.mip_node_count)) if is_mip else 0,
        seconds=highs.getRunTime(),
        message=highs.modelStatusToString(status),
    )


def _run_without_columns(program: ProgramArrays) -> SolverRun:
    """Return the answer for a program without variables: optimal if all its rows hold. HiGHS calls
    it empty and does not check the rows."""
    is_equal = program.senses == EQUAL
    is_feasible = np.where(is_equal, program.rhs == 0, program.senses * program.rhs <= 0).all()
    if is_feasible:
        return SolverRun(
            SolverOutcome.OPTIMAL, None, program.offset, program.offset, 0, 0.0, "Empty"
        )
    return SolverRun(SolverOutcome.INFEASIBLE, None, None, None, 0, 0.0, "Empty")


def _finite_or_none(number: float) -> float | None:
    """Return the number, or None for what HiGHS calls infinite."""
    return number if math.isfinite(number) and abs(number) < 1e100 else None
