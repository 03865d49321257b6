"""Which way each call of a block runs: the cheapest ways that fit the budget together.

A program with a binary for each way of each call, and a row for each event of the step:
what is held outside, what earlier calls saved, and what this one needs, is at most the budget. It
is a multiple-choice knapsack in which every prefix of the calls has its own capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from remat.blockwise.step import BlockStep
from remat.errors import InfeasibleBudget
from remat.limits.budget import format_bytes, perhaps_a_share
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import BulkHiGHS
from remat.milp.solvers.pulp_versions import expression

_GAP = 1e-3
_TIME_LIMIT_S = 10.0
_TOLERANCE = 2e-6
"""By how much of its unit a solver may miss a row."""

NEAR_MIN = 1.01
"""A step at the very smallest peak costs far more than one a per cent above it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The number of each call's way. No choice takes less than `bound_s`."""

    ways: tuple[int, ...]
    bound_s: float


def choose(
    step: BlockStep,
    budget_bytes: int | None,
    threads: int = 2,
    tied: Sequence[int] | None = None,
) -> Choice:
    """The cheapest choice with a peak of at most `budget_bytes`; without a budget, of at most one
    per cent above the smallest peak. Call c runs in the way of call `tied[c]`, if that is said.

    Raises `InfeasibleBudget` with the smallest peak where no choice fits.
    """
    least_bytes = step.peak_bytes(_cheapest(step, None, threads, tied).ways)
    if budget_bytes is None:
        budget_bytes = int(NEAR_MIN * least_bytes)
    if budget_bytes < least_bytes:  # which is the smallest but for the solver's gap
        found = _solved(step, budget_bytes, 0.0, threads, tied)
        if step.peak_bytes(found.ways) <= budget_bytes:
            return found
    check_feasible(least_bytes, budget_bytes)
    return _cheapest(step, budget_bytes, threads, tied)


def check_feasible(least_bytes: int, budget_bytes: int) -> None:
    """Raises `InfeasibleBudget` for a budget below the smallest peak."""
    if budget_bytes < least_bytes:
        raise InfeasibleBudget(
            f"with its blocks planned one by one, the step takes {format_bytes(least_bytes)} at "
            f"least, and the budget is {format_bytes(budget_bytes)}; pass at least "
            f'{least_bytes:,} bytes, or "min"{perhaps_a_share(budget_bytes, least_bytes)}',
            min_feasible_bytes=least_bytes,
        )


def least_peak_bytes(step: BlockStep, threads: int = 2) -> int:
    """The smallest peak of all choices."""
    return step.peak_bytes(_cheapest(step, None, threads, None).ways)


def fastest(step: BlockStep) -> tuple[int, ...]:
    """The fastest way of each call, whatever it holds."""
    return tuple(min(range(len(o)), key=lambda w: o[w].time_s) for o in step.calls)


def _cheapest(
    step: BlockStep, budget_bytes: int | None, threads: int, tied: Sequence[int] | None
) -> Choice:
    """The cheapest choice for a budget that fits some; without one, that with the least peak."""
    quick = fastest(step)
    agree = all(quick[call] == quick[other] for call, other in enumerate(tied or ()))
    if budget_bytes is not None and agree and step.peak_bytes(quick) <= budget_bytes:
        return Choice(quick, step.time_s(quick))
    found = _solved(step, budget_bytes, 0.0, threads, tied)
    if budget_bytes is not None and step.peak_bytes(found.ways) > budget_bytes:
        found = _solved(step, budget_bytes, _TOLERANCE, threads, tied)
    if budget_bytes is not None and step.peak_bytes(found.ways) > budget_bytes:
        return Choice(_cheapest(step, None, threads, tied).ways, 0.0)  # too tight for a solver
    return found


def _solved(
    step: BlockStep,
    budget_bytes: int | None,
    less: float,
    threads: int,
    tied: Sequence[int] | None,
) -> Choice:
    tied = tied or range(len(step.calls))
    program = _Program(step, budget_bytes, less, tied)
    run = BulkHiGHS(gap=_GAP, time_limit=_TIME_LIMIT_S, threads=threads)
    found = run.solve(pulp_versions.read(program.problem))
    ways = _smallest(step, tied) if found.objective is None else program.chosen()
    return Choice(ways, (found.bound or 0.0) * program.unit_s)


def _smallest(step: BlockStep, tied: Sequence[int]) -> tuple[int, ...]:
    """The way of each call that saves least, for where a solver finds nothing in its time."""
    least = [
        min(range(len(o)), key=lambda w: (o[w].saved_bytes, o[w].backward_bytes))
        for o in step.calls
    ]
    return tuple(least[other] for other in tied)


class _Program:
    """In units of the largest number of its kind, which solvers like better than bytes. The budget
    is by so many of them less than was asked for."""

    def __init__(
        self, step: BlockStep, budget_bytes: int | None, less: float, tied: Sequence[int]
    ) -> None:
        self.step = step
        self.unit_s = max((w.time_s for o in step.calls for w in o), default=0.0) or 1.0
        held_bytes = max((e.held_bytes for e in step.events), default=0)
        own_bytes = max((w.backward_bytes for o in step.calls for w in o), default=0)
        self._unit_bytes = (held_bytes + own_bytes) or 1
        self.problem = pulp.LpProblem("blocks", pulp.LpMinimize)
        self._runs = [
            [self.problem.add_variable(f"x{c}_{w}", 0, 1, pulp.LpInteger) for w in range(len(o))]
            for c, o in enumerate(step.calls)
        ]
        peak = self.problem.add_variable("peak", 0)
        rows = [
            (f"one{c}", dict.fromkeys(runs, 1.0), pulp.LpConstraintEQ, 1.0)
            for c, runs in enumerate(self._runs)
        ]
        for call, other in enumerate(tied):
            pairs = zip(self._runs[call], self._runs[other], strict=True)
            for way, (x, y) in enumerate(pairs if call != other else ()):
                row = (f"tied{call}_{way}", {x: 1.0, y: -1.0}, pulp.LpConstraintEQ, 0.0)
                rows.append(row)
        limit = (budget_bytes or 0) / self._unit_bytes - less
        held: set[int] = set()
        for number, event in enumerate(step.events):
            held.discard(event.call)
            terms: dict[pulp.LpVariable, float] = {}
            for call in range(len(step.calls)):
                batches = step.in_flight - (call not in held)
                for x, share in self._bytes(call, "saved_bytes") if batches else ():
                    terms[x] = batches * share
            if event.kind != "outside":
                for x, share in self._bytes(event.call, f"{event.kind}_bytes"):
                    terms[x] = terms.get(x, 0.0) + share
            room = -(event.held_bytes + step.others_bytes) / self._unit_bytes
            if budget_bytes is None:
                terms[peak] = -1.0
            else:
                room += limit
            rows.append((f"at{number}", terms, pulp.LpConstraintLE, room))
            if event.kind == "forward":
                held.add(event.call)
        pulp_versions.add_rows(self.problem, rows)
        costs = {
            x: way.time_s / self.unit_s
            for runs, options in zip(self._runs, step.calls, strict=True)
            for x, way in zip(runs, options, strict=True)
        }
        self.problem.setObjective(expression({peak: 1.0} if budget_bytes is None else costs))

    def _bytes(self, call: int, kind: str) -> list[tuple[pulp.LpVariable, float]]:
        pairs = zip(self._runs[call], self.step.calls[call], strict=True)
        return [(x, getattr(way, kind) / self._unit_bytes) for x, way in pairs]

    def chosen(self) -> tuple[int, ...]:
        """After a solve."""
        return tuple(_largest([x.varValue or 0.0 for x in runs]) for runs in self._runs)


def _largest(numbers: Sequence[float]) -> int:
    return max(range(len(numbers)), key=numbers.__getitem__)
