"""Choice of one option for each block call: the fastest options that fit the budget together.

A MILP with a binary for each option of each call, and a row for each event of the step: the memory
in use outside of blocks, what earlier calls saved, and what the running block needs are at most the
budget. It is a multiple-choice knapsack in which every prefix of the calls has its own capacity.
Executors that take one setting for all blocks have few settings: each of them is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from remat.blockwise.block_step import BlockStep
from remat.errors import InfeasibleBudget
from remat.limits.budget import missing_percent_sign_hint
from remat.limits.units import format_bytes
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.pulp_versions import expression

_GAP = 1e-3
_TIME_LIMIT_S = 10.0
_TOLERANCE = 2e-6
"""Largest amount, in units of the program, by which a solver may violate a row."""

NEAR_MINIMUM_FACTOR = 1.01
"""Budget of "min", relative to the smallest peak. At exactly the smallest peak a step is much
slower than with one percent more memory."""

ExecutorSetting = tuple[int, ...]
"""The option index of each call under one setting of an executor that applies to all blocks."""


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """The index of the option that each call runs in. No choice that fits the budget is faster than
    `bound_s`."""

    option_indices: tuple[int, ...]
    bound_s: float


def choose_options(
    step: BlockStep,
    budget_bytes: int | None,
    threads: int = 2,
    tied: Sequence[int] | None = None,
) -> OptionChoice:
    """Return the fastest choice with a peak of at most `budget_bytes`.

    Without a budget, the peak may be one percent above the smallest one. If `tied` is given, call
    `c` must use the same option as call `tied[c]`.

    Raises `InfeasibleBudget` with the smallest peak if no choice fits.
    """
    minimum_bytes = step.peak_bytes(_fastest_or_smallest(step, None, threads, tied).option_indices)
    if budget_bytes is None:
        budget_bytes = int(NEAR_MINIMUM_FACTOR * minimum_bytes)
    if budget_bytes < minimum_bytes:  # the smallest peak only within the solver's gap: try anyway
        choice = _solve(step, budget_bytes, 0.0, threads, tied)
        if step.peak_bytes(choice.option_indices) <= budget_bytes:
            return choice
    check_budget_feasible(minimum_bytes, budget_bytes)
    return _fastest_or_smallest(step, budget_bytes, threads, tied)


def cheapest_setting(
    step: BlockStep, settings: Sequence[ExecutorSetting], budget_bytes: int | None
) -> ExecutorSetting:
    """Return the fastest setting with a peak of at most `budget_bytes`.

    Of settings that take the same time, return the first: a clock that measures no difference is no
    reason to recompute anything. Without a budget, the peak may be one percent above the smallest.

    Raises `InfeasibleBudget` with the smallest peak if no setting fits.
    """
    peaks = {setting: step.peak_bytes(setting) for setting in settings}
    minimum_bytes = min(peaks.values())
    if budget_bytes is None:
        budget_bytes = int(NEAR_MINIMUM_FACTOR * minimum_bytes)
    check_budget_feasible(minimum_bytes, budget_bytes)
    fitting = [setting for setting, peak_bytes in peaks.items() if peak_bytes <= budget_bytes]
    return min(fitting, key=step.time_s)


def check_budget_feasible(minimum_bytes: int, budget_bytes: int) -> None:
    """Raise `InfeasibleBudget` if the budget is below `minimum_bytes`, the smallest peak."""
    if budget_bytes < minimum_bytes:
        raise InfeasibleBudget(
            f"with its blocks planned separately, the step needs {format_bytes(minimum_bytes)} at "
            f"least, and the budget is {format_bytes(budget_bytes)}; pass at least "
            f'{minimum_bytes:,} bytes, or "min"'
            f"{missing_percent_sign_hint(budget_bytes, minimum_bytes)}",
            min_feasible_bytes=minimum_bytes,
        )


def minimum_peak_bytes(step: BlockStep, threads: int = 2) -> int:
    """Return the smallest peak of all choices."""
    return step.peak_bytes(_fastest_or_smallest(step, None, threads, None).option_indices)


def fastest_options(step: BlockStep) -> tuple[int, ...]:
    """Return the index of the fastest option of each call, regardless of memory."""
    return tuple(
        min(range(len(options)), key=lambda index: options[index].time_s)
        for options in step.options_per_call
    )


def _fastest_or_smallest(
    step: BlockStep, budget_bytes: int | None, threads: int, tied: Sequence[int] | None
) -> OptionChoice:
    """Return the fastest choice within a feasible budget, or without one that of smallest peak."""
    fastest = fastest_options(step)
    respects_ties = all(fastest[call] == fastest[other] for call, other in enumerate(tied or ()))
    if budget_bytes is not None and respects_ties and step.peak_bytes(fastest) <= budget_bytes:
        return OptionChoice(fastest, step.time_s(fastest))
    choice = _solve(step, budget_bytes, 0.0, threads, tied)
    if budget_bytes is not None and step.peak_bytes(choice.option_indices) > budget_bytes:
        choice = _solve(step, budget_bytes, _TOLERANCE, threads, tied)
    if budget_bytes is not None and step.peak_bytes(choice.option_indices) > budget_bytes:
        # The budget is too tight for the solver's tolerance: fall back to the smallest peak.
        smallest = _fastest_or_smallest(step, None, threads, tied)
        return OptionChoice(smallest.option_indices, 0.0)
    return choice


def _solve(
    step: BlockStep,
    budget_bytes: int | None,
    margin: float,
    threads: int,
    tied: Sequence[int] | None,
) -> OptionChoice:
    """Return the MILP's choice; if the solver has none in time, the options that save least."""
    tied = tied or range(len(step.options_per_call))
    program = _ChoiceProgram(step, budget_bytes, margin, tied)
    solver = HighsSolver(gap=_GAP, time_limit=_TIME_LIMIT_S, threads=threads)
    result = solver.solve(pulp_versions.read_arrays(program.problem))
    indices = _least_saved(step, tied) if result.objective is None else program.chosen()
    return OptionChoice(indices, (result.bound or 0.0) * program.unit_s)


def _least_saved(step: BlockStep, tied: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the option of each call that saves the fewest bytes."""
    smallest = [
        min(range(len(o)), key=lambda index: (o[index].saved_bytes, o[index].backward_bytes))
        for o in step.options_per_call
    ]
    return tuple(smallest[other] for other in tied)


class _ChoiceProgram:
    """The MILP of a choice. Bytes and seconds are in units of the largest of their kind, which
    solvers handle better than raw bytes. The budget is reduced by `margin` of these units."""

    def __init__(
        self, step: BlockStep, budget_bytes: int | None, margin: float, tied: Sequence[int]
    ) -> None:
        self.step = step
        options = [option for candidates in step.options_per_call for option in candidates]
        self.unit_s = max((option.time_s for option in options), default=0.0) or 1.0
        non_block_bytes = max((event.non_block_bytes for event in step.events), default=0)
        block_bytes = max((option.backward_bytes for option in options), default=0)
        self._unit_bytes = (non_block_bytes + block_bytes) or 1
        self.problem = pulp.LpProblem("blocks", pulp.LpMinimize)
        self._selects = [
            [self.problem.add_variable(f"x{c}_{w}", 0, 1, pulp.LpInteger) for w in range(len(o))]
            for c, o in enumerate(step.options_per_call)
        ]
        peak = self.problem.add_variable("peak", 0)
        rows = [
            (f"one{call}", dict.fromkeys(selects, 1.0), pulp.LpConstraintEQ, 1.0)
            for call, selects in enumerate(self._selects)
        ]
        for call, other in enumerate(tied):
            pairs = zip(self._selects[call], self._selects[other], strict=True)
            for index, (x, y) in enumerate(pairs if call != other else ()):
                row = (f"tied{call}_{index}", {x: 1.0, y: -1.0}, pulp.LpConstraintEQ, 0.0)
                rows.append(row)
        limit = (budget_bytes or 0) / self._unit_bytes - margin
        pending: set[int] = set()  # calls between their forward and their backward
        for number, event in enumerate(step.events):
            pending.discard(event.call)
            terms: dict[pulp.LpVariable, float] = {}
            for call in range(len(step.options_per_call)):
                batches = step.in_flight - (call not in pending)
                for x, size in self._sizes(call, "saved_bytes") if batches else ():
                    terms[x] = batches * size
            if event.kind != "outside":
                for x, size in self._sizes(event.call, f"{event.kind}_bytes"):
                    terms[x] = terms.get(x, 0.0) + size
            capacity = -(event.non_block_bytes + step.other_batches_bytes) / self._unit_bytes
            if budget_bytes is None:
                terms[peak] = -1.0
            else:
                capacity += limit
            rows.append((f"at{number}", terms, pulp.LpConstraintLE, capacity))
            if event.kind == "forward":
                pending.add(event.call)
        pulp_versions.add_rows(self.problem, rows)
        costs = {
            x: option.time_s / self.unit_s
            for selects, candidates in zip(self._selects, step.options_per_call, strict=True)
            for x, option in zip(selects, candidates, strict=True)
        }
        self.problem.setObjective(expression({peak: 1.0} if budget_bytes is None else costs))

    def _sizes(self, call: int, field: str) -> list[tuple[pulp.LpVariable, float]]:
        """Return each option's variable with its size `field`, in units of the program."""
        pairs = zip(self._selects[call], self.step.options_per_call[call], strict=True)
        return [(x, getattr(option, field) / self._unit_bytes) for x, option in pairs]

    def chosen(self) -> tuple[int, ...]:
        """Return the option index of each call after a solve."""
        values = [[x.varValue or 0.0 for x in selects] for selects in self._selects]
        return tuple(max(range(len(v)), key=v.__getitem__) for v in values)
