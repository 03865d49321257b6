"""Selective checkpointing of one block: the outputs to save, for a range of memory limits.

Under the rules of other checkpointing libraries a block is recomputed as a whole before its
backward, except for the outputs that it saved: whatever is not saved is recomputed once, needed or
not. So what to save is a knapsack: each candidate saves its time and takes its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.pulp_versions import expression

_LIMIT_FRACTIONS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Limits of the saved bytes, as fractions of the bytes of all candidates."""

_GAP = 1e-3
_TIME_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class SaveCandidate:
    """An output that may be saved: it takes `size_bytes`, and its recomputation takes `time_s`.

    It may be saved only together with the candidates whose indices are in `needs`, and with none
    of those in `excludes`.
    """

    time_s: float
    size_bytes: int
    needs: tuple[int, ...] = ()
    excludes: tuple[int, ...] = ()


def save_selections(candidates: Sequence[SaveCandidate]) -> list[frozenset[int]]:
    """Return the sets of candidates to save, by index, that save the most recomputation time for a
    range of memory limits, the smallest limit first."""
    total_bytes = sum(c.size_bytes for c in candidates)
    selections: dict[frozenset[int], None] = {}
    for fraction in _LIMIT_FRACTIONS:
        selections[_best_selection(candidates, fraction * total_bytes)] = None
    selections.pop(frozenset(), None)
    return list(selections)


def _best_selection(candidates: Sequence[SaveCandidate], limit_bytes: float) -> frozenset[int]:
    """Return the candidates to save within `limit_bytes`, by index: the optimum of the knapsack."""
    problem = pulp.LpProblem("saving", pulp.LpMinimize)
    is_saved = [
        problem.add_variable(f"x{index}", 0, 1, pulp.LpInteger) for index in range(len(candidates))
    ]
    unit_bytes, unit_s = max(limit_bytes, 1.0), math.fsum(c.time_s for c in candidates) or 1.0
    sizes = {x: c.size_bytes / unit_bytes for x, c in zip(is_saved, candidates, strict=True)}
    rows = [("room", sizes, pulp.LpConstraintLE, limit_bytes / unit_bytes)]
    for index, candidate in enumerate(candidates):
        for other in candidate.needs:
            terms = {is_saved[index]: 1.0, is_saved[other]: -1.0}
            rows.append((f"needs{index}_{other}", terms, pulp.LpConstraintLE, 0.0))
        for other in candidate.excludes:
            terms = {is_saved[index]: 1.0, is_saved[other]: 1.0}
            rows.append((f"without{index}_{other}", terms, pulp.LpConstraintLE, 1.0))
    pulp_versions.add_rows(problem, rows)
    pairs = zip(is_saved, candidates, strict=True)
    problem.setObjective(expression({x: -c.time_s / unit_s for x, c in pairs}))
    solver = HighsSolver(gap=_GAP, time_limit=_TIME_LIMIT_S, threads=2)
    solver.solve(pulp_versions.read_arrays(problem))
    return frozenset(index for index, x in enumerate(is_saved) if (x.varValue or 0.0) > 0.5)
