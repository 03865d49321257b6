"""What a checkpointed block saves, under the rules of checkpointing as others execute it: the block
is run again as a whole before its backward, but for what was saved.

So whatever is not saved is computed again, needed or not, once and all of it. What is left to
decide is a knapsack: each candidate saves its time and takes its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import BulkHiGHS
from remat.milp.solvers.pulp_versions import expression

_SHARES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Of the bytes of all candidates: how much may be saved."""

_GAP = 1e-3
_TIME_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be saved: `time_s` that it then need not take again, and `size_bytes` held for it.

    It is saved only with those that it `needs`, and with none that it `excludes`.
    """

    time_s: float
    size_bytes: int
    needs: tuple[int, ...] = ()
    excludes: tuple[int, ...] = ()


def selections(candidates: Sequence[Candidate]) -> list[frozenset[int]]:
    """The best numbers of candidates to save, for a range of room, the least first."""
    total_bytes = sum(c.size_bytes for c in candidates)
    found: dict[frozenset[int], None] = {}
    for share in _SHARES:
        found[_best(candidates, share * total_bytes)] = None
    found.pop(frozenset(), None)
    return list(found)


def _best(candidates: Sequence[Candidate], room_bytes: float) -> frozenset[int]:
    problem = pulp.LpProblem("saving", pulp.LpMinimize)
    saved = [
        problem.add_variable(f"x{number}", 0, 1, pulp.LpInteger)
        for number in range(len(candidates))
    ]
    unit_bytes, unit_s = max(room_bytes, 1.0), math.fsum(c.time_s for c in candidates) or 1.0
    room = {x: c.size_bytes / unit_bytes for x, c in zip(saved, candidates, strict=True)}
    rows = [("room", room, pulp.LpConstraintLE, room_bytes / unit_bytes)]
    for number, candidate in enumerate(candidates):
        for other in candidate.needs:
            terms = {saved[number]: 1.0, saved[other]: -1.0}
            rows.append((f"needs{number}_{other}", terms, pulp.LpConstraintLE, 0.0))
        for other in candidate.excludes:
            terms = {saved[number]: 1.0, saved[other]: 1.0}
            rows.append((f"without{number}_{other}", terms, pulp.LpConstraintLE, 1.0))
    pulp_versions.add_rows(problem, rows)
    times = zip(saved, candidates, strict=True)
    problem.setObjective(expression({x: -c.time_s / unit_s for x, c in times}))
    run = BulkHiGHS(gap=_GAP, time_limit=_TIME_LIMIT_S, threads=2)
    run.solve(pulp_versions.read(problem))
    return frozenset(n for n, x in enumerate(saved) if (x.varValue or 0.0) > 0.5)
