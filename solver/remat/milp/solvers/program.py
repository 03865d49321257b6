"""Programs as columns and rows, the arrays that solvers read, and the answer of any solver.

Every program is written with `Program`, without PuLP: PuLP's variables and expressions take longer
to create than HiGHS takes to solve a small program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from remat.graph import Graph
from remat.schedule import Schedule

AT_MOST, EQUAL, AT_LEAST = -1, 0, 1
"""Senses of a row: what the sum of its terms is, compared with the right-hand side."""

COST_SCALE = 1000.0
"""The total cost of one step without recomputation, in units of an objective."""


def cost_unit_s(graph: Graph) -> float:
    """Return the seconds in one unit of an objective."""
    return graph.total_cost_s / COST_SCALE or 1.0


def size_unit_bytes(scale_bytes: int) -> int:
    """Return the bytes in one unit of memory rows: about a thousandth of `scale_bytes`, and a power
    of two, so that no size is rounded."""
    return 1 << max(0, scale_bytes.bit_length() - 11)


@dataclass(eq=False, slots=True)
class Column:
    """A variable of a `Program`, with its bounds; it is equal to no other. `value` is its value in
    the solution, None where a solver has none."""

    name: str
    lower: float
    upper: float
    is_integer: bool
    value: float | None = None

    @property
    def is_one(self) -> bool:
        """True if a binary variable is 1 in the solution."""
        return (self.value or 0.0) > 0.5


Term = Column | int
"""A variable, or 0 or 1 where its value is fixed."""


def value_of(term: Term) -> float:
    """Return the value of a term in the solution: 0 for a variable without a value."""
    return float(term) if isinstance(term, int) else term.value or 0.0


class Program:
    """A program to minimise: the sum of `costs` and `offset`, subject to rows."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.costs: dict[Column, float] = {}
        self.offset = 0.0
        self.rows: list[tuple[dict[Column, float], int, float]] = []
        """Terms, sense and right-hand side."""

    def add_column(
        self, name: str, lower: float = 0.0, upper: float = math.inf, *, is_integer: bool = False
    ) -> Column:
        """Add a variable. Names are distinct."""
        column = Column(name, lower, upper, is_integer)
        self.columns.append(column)
        return column

    def add_binary(self, name: str) -> Column:
        """Add a variable that is 0 or 1."""
        return self.add_column(name, 0, 1, is_integer=True)

    def add_row(self, terms: dict[Column, float], sense: int, rhs: float) -> None:
        """Add the row: sum of terms (sense) rhs."""
        self.rows.append((terms, sense, rhs))

    def add_terms(self, terms: Iterable[tuple[float, Term]], sense: int, rhs: float) -> None:
        """Add the row: sum of coefficients times terms (sense) rhs. Fixed terms are moved to the
        right-hand side.

        A row without variables is either void, and left out, or false. Solvers accept no empty
        rows, so a false one gets a variable that is fixed to 0.
        """
        coefficients: dict[Column, float] = {}
        for coefficient, term in terms:
            if isinstance(term, int):
                rhs -= coefficient * term
            else:
                coefficients[term] = coefficients.get(term, 0.0) + coefficient
        is_false = (sense != AT_LEAST and rhs < 0) or (sense != AT_MOST and rhs > 0)
        if not coefficients and is_false:
            coefficients[self.add_column(f"none{len(self.rows):06d}", 0, 0)] = 1.0
        if coefficients:
            self.add_row(coefficients, sense, rhs)

    def arrays(self) -> ProgramArrays:
        """Return the program in its present state as arrays, with the columns in the order of their
        names."""
        columns = sorted(self.columns, key=lambda column: column.name)
        index = {column: i for i, column in enumerate(columns)}
        starts = np.zeros(len(self.rows) + 1, dtype=np.int32)
        np.cumsum([len(terms) for terms, _, _ in self.rows], out=starts[1:])
        return ProgramArrays(
            columns=tuple(columns),
            costs=np.array([self.costs.get(column, 0.0) for column in columns], dtype=np.float64),
            offset=self.offset,
            lower=np.array([column.lower for column in columns], dtype=np.float64),
            upper=np.array([column.upper for column in columns], dtype=np.float64),
            is_integer=np.array([column.is_integer for column in columns], dtype=np.bool_),
            starts=starts,
            indices=np.array(
                [index[column] for terms, _, _ in self.rows for column in terms], dtype=np.int32
            ),
            coefficients=np.array(
                [coefficient for terms, _, _ in self.rows for coefficient in terms.values()],
                dtype=np.float64,
            ),
            senses=np.array([sense for _, sense, _ in self.rows], dtype=np.int8),
            rhs=np.array([rhs for _, _, rhs in self.rows], dtype=np.float64),
        )


@dataclass(frozen=True)
class ProgramArrays:
    """A program as arrays. Columns are in the order of their names; the entries of row i are
    `starts[i]` to `starts[i + 1]` of `indices` (columns) and `coefficients`.

    The sum of a row's entries is at most (`senses` -1), exactly (0), or at least (1) `rhs`.
    """

    columns: tuple[Column, ...]
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

    def relaxed(self) -> ProgramArrays:
        """Return the linear relaxation."""
        return replace(self, is_integer=np.zeros(len(self.columns), dtype=np.bool_))

    def row(self, number: int) -> Iterator[tuple[int, float]]:
        """Return the entries of a row: columns and coefficients."""
        entries = slice(self.starts[number], self.starts[number + 1])
        return zip(self.indices[entries].tolist(), self.coefficients[entries].tolist(), strict=True)

    def row_activities(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of each row's terms, for these values of the columns."""
        of_row = np.repeat(np.arange(len(self.rhs)), np.diff(self.starts))
        terms = self.coefficients * values[self.indices]
        return np.bincount(of_row, terms, minlength=len(self.rhs)).astype(np.float64)


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
