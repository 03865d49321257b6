"""A program as arrays, as HiGHS reads it, and its columns and rows without PuLP.

PuLP's variables and expressions take longer to create than HiGHS takes to solve a small program, so
that programs which are solved many times are written with `ArrayProgram`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from remat.schedule import Schedule


@dataclass(eq=False, slots=True)
class Column:
    """A variable of an `ArrayProgram`, with its bounds; it is equal to no other. `varValue` is its
    value in the solution, under the name that PuLP's variables have for it."""

    name: str
    lower: float
    upper: float
    is_integer: bool
    varValue: float | None = None


Variable = Any
"""A variable of PuLP's, or a `Column`."""


@dataclass(frozen=True)
class ProgramArrays:
    """A problem as arrays. Columns are in the order of the variables' names; the entries of row i
    are `starts[i]` to `starts[i + 1]` of `indices` (columns) and `coefficients`.

    The sum of a row's entries is at most (`senses` -1), exactly (0), or at least (1) `rhs`.
    """

    variables: tuple[Variable, ...]
    costs: NDArray[np.float64]
    offset: float
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    is_integer: NDArray[np.bool_]
    starts: NDArray[np.int32]
    indices: NDArray[np.int32]
    coefficients: NDArray[np.float64]
    senses: NDArray[np.int8]
    rhs: NDArray[np.float64]
    problem: pulp.LpProblem | None = None
    """Referenced because PuLP 4's variables are invalid without it; None for an `ArrayProgram`."""

    def relaxed(self) -> ProgramArrays:
        """Return the linear relaxation."""
        return replace(self, is_integer=np.zeros(len(self.variables), dtype=np.bool_))

    def integral(self) -> ProgramArrays:
        """Return the program in which every variable is an integer."""
        return replace(self, is_integer=np.ones(len(self.variables), dtype=np.bool_))

    def row_activities(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of each row's entries, for a value of each column."""
        of_row = np.repeat(np.arange(len(self.rhs)), np.diff(self.starts))
        terms = self.coefficients * values[self.indices]
        return np.bincount(of_row, terms, minlength=len(self.rhs)).astype(np.float64)


@dataclass
class ArrayProgram:
    """A program to minimise, whose rows say that a sum of terms is at least a number."""

    costs: dict[Column, float] = field(default_factory=dict[Column, float])
    offset: float = 0.0
    _columns: list[Column] = field(default_factory=list[Column])
    _rows: list[tuple[dict[Column, float], float]] = field(
        default_factory=list[tuple[dict[Column, float], float]]
    )

    def add_column(
        self, name: str, lower: float, upper: float = np.inf, *, is_integer: bool = False
    ) -> Column:
        """Add a variable. Names are distinct."""
        column = Column(name, lower, upper, is_integer)
        self._columns.append(column)
        return column

    def add_row(self, terms: dict[Column, float], at_least: float) -> None:
        """Add the row that the sum of the terms is at least a number."""
        self._rows.append((terms, at_least))

    def arrays(self) -> ProgramArrays:
        """Return the program in its present state."""
        columns = sorted(self._columns, key=lambda column: column.name)
        index = {column: i for i, column in enumerate(columns)}
        starts = np.zeros(len(self._rows) + 1, dtype=np.int32)
        np.cumsum([len(terms) for terms, _ in self._rows], out=starts[1:])
        return ProgramArrays(
            variables=tuple(columns),
            costs=np.array([self.costs.get(column, 0.0) for column in columns], dtype=np.float64),
            offset=self.offset,
            lower=np.array([column.lower for column in columns], dtype=np.float64),
            upper=np.array([column.upper for column in columns], dtype=np.float64),
            is_integer=np.array([column.is_integer for column in columns], dtype=np.bool_),
            starts=starts,
            indices=np.array(
                [index[column] for terms, _ in self._rows for column in terms], dtype=np.int32
            ),
            coefficients=np.array(
                [coefficient for terms, _ in self._rows for coefficient in terms.values()],
                dtype=np.float64,
            ),
            senses=np.full(len(self._rows), pulp.LpConstraintGE, dtype=np.int8),
            rhs=np.array([at_least for _, at_least in self._rows], dtype=np.float64),
        )


class SolverOutcome(Enum):
    """How a solver run ended."""

    OPTIMAL = "within the requested gap"
    FEASIBLE = "stopped early with a solution"
    INFEASIBLE = "proved that there is no solution over these slots"
    UNKNOWN = "stopped early without a solution"


@dataclass(frozen=True, slots=True)
class SolverRun:
    """A solver's answer.

    `objective` and `bound` are in the program's units, None where unknown. `schedule` is the
    solution as a schedule, where the program has one.
    """

    outcome: SolverOutcome
    schedule: Schedule | None
    objective: float | None
    bound: float | None
    nodes: int
    seconds: float
    message: str
