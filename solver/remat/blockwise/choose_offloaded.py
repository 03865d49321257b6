"""Choice of an option for each block call, and of the saved tensors that it offloads to the host.

The MILP of `choose`, with a binary for each variant of each call. Offloaded bytes do not count in
the events between their release and their reload. A copy runs while exactly one other call
computes: the step waits for the part of the copy that takes longer than that call, a variable for
each call and direction. Its rows are linear, and exact for the simulator
(`remat.blockwise.offloaded_step`), since the copy of a call starts when that of the call before has
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pulp

from remat.blockwise.choose import (
    NEAR_MINIMUM_FACTOR,
    check_budget_feasible,
    choose_options,
    fastest_options,
)
from remat.blockwise.offloaded_step import CallVariant, OffloadedStep, StepOutcome, host_stays
from remat.errors import InfeasibleBudget
from remat.milp.solvers import pulp_versions
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.pulp_versions import expression

_GAP = 1e-3
_TIME_LIMIT_S = 10.0
_TOLERANCES = (0.0, 2e-6, 2e-5)
"""Amounts, in units of the program, by which the budgets are lowered, one after another, until the
solver's tolerance violates no row."""

_LEAST_GAIN = 1e-3
"""The share of the step's time that offloading must save, at least."""


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """The variant that each call runs in, with the step's outcome. No choice that fits the budget,
    with offloading or without, is faster than `bound_s`."""

    variants: tuple[CallVariant, ...]
    outcome: StepOutcome
    bound_s: float

    @property
    def option_indices(self) -> tuple[int, ...]:
        """The index of the option of each call."""
        return tuple(variant.option for variant in self.variants)


def choose_variants(
    offloaded: OffloadedStep, budget_bytes: int | None, threads: int = 2
) -> VariantChoice:
    """Return the fastest choice with a peak of at most `budget_bytes`.

    The choice without offloading is returned unless another is faster, or it does not fit. Without
    a budget, the peak may be one percent above the smallest one.

    Raises `InfeasibleBudget` with the smallest peak if no choice fits.
    """
    if budget_bytes is None:
        minimum_bytes = minimum_offloaded_peak_bytes(offloaded, threads)
        budget_bytes = int(NEAR_MINIMUM_FACTOR * minimum_bytes)
    without: VariantChoice | None = None
    try:
        choice = choose_options(offloaded.step, budget_bytes, threads)
    except InfeasibleBudget:
        pass
    else:
        variants = tuple(map(CallVariant, choice.option_indices))
        without = VariantChoice(variants, offloaded.outcome(variants), choice.bound_s)
        if choice.option_indices == fastest_options(offloaded.step):
            return without
    best = _fastest(offloaded, budget_bytes, threads)
    if best is None and without is None:
        minimum_bytes = minimum_offloaded_peak_bytes(offloaded, threads)
        check_budget_feasible(minimum_bytes, budget_bytes)
        smallest = _smallest(offloaded, threads)  # the solver found it, but not for the budget
        return VariantChoice(smallest, offloaded.outcome(smallest), 0.0)
    if best is None:
        assert without is not None
        return replace(without, bound_s=0.0)
    if without is not None:
        least_s = (1 - _LEAST_GAIN) * without.outcome.time_s
        if best.outcome.time_s > least_s:
            return replace(without, bound_s=min(best.bound_s, without.outcome.time_s))
    return best


def minimum_offloaded_peak_bytes(offloaded: OffloadedStep, threads: int = 2) -> int:
    """Return the smallest peak of all choices."""
    return offloaded.outcome(_smallest(offloaded, threads)).peak_bytes


def _smallest(offloaded: OffloadedStep, threads: int) -> tuple[CallVariant, ...]:
    """Return the choice with the smallest peak; by `choose` alone if the solver has none in
    time."""
    candidates = [
        tuple(map(CallVariant, choose_options(offloaded.step, None, threads).option_indices))
    ]
    for tolerance in _TOLERANCES:
        program = _VariantProgram(offloaded, None, tolerance)
        chosen = program.solve(threads)
        if chosen is not None and _fits_host(offloaded, chosen):
            candidates.append(chosen)
            break
    return min(candidates, key=lambda c: offloaded.outcome(c).peak_bytes)


def _fastest(offloaded: OffloadedStep, budget_bytes: int, threads: int) -> VariantChoice | None:
    """Return the fastest choice within a budget, without copies that save no time; None if the
    solver finds none."""
    bound_s = 0.0
    for tolerance in _TOLERANCES:
        program = _VariantProgram(offloaded, budget_bytes, tolerance)
        chosen = program.solve(threads)
        if not tolerance:
            bound_s = program.bound_s
        if chosen is None:
            continue
        outcome = offloaded.outcome(chosen)
        if outcome.peak_bytes <= budget_bytes and _fits_host(offloaded, chosen):
            chosen = _without_needless_copies(offloaded, chosen, budget_bytes)
            outcome = offloaded.outcome(chosen)
            return VariantChoice(chosen, outcome, min(bound_s, outcome.time_s))
    return None


def _fits_host(offloaded: OffloadedStep, chosen: Sequence[CallVariant]) -> bool:
    if offloaded.host_bytes is None:
        return True
    return offloaded.outcome(chosen).host_bytes <= offloaded.host_bytes


def _without_needless_copies(
    offloaded: OffloadedStep, chosen: tuple[CallVariant, ...], budget_bytes: int
) -> tuple[CallVariant, ...]:
    """Return the choice with fewer offloaded bytes, where the budget and the time allow that. To
    the program hidden copies are free: it has no reason to leave them out."""
    time_s = offloaded.outcome(chosen).time_s
    for call, variant in enumerate(chosen):
        smaller = [
            v
            for v in (CallVariant(variant.option), *offloaded.variants_per_call[call])
            if v.option == variant.option and v.size_bytes < variant.size_bytes
        ]
        for replacement in sorted(smaller, key=lambda v: v.size_bytes):
            changed = (*chosen[:call], replacement, *chosen[call + 1 :])
            outcome = offloaded.outcome(changed)
            if outcome.peak_bytes <= budget_bytes and outcome.time_s <= time_s:
                chosen = changed
                break
    return chosen


class _VariantProgram:
    """The MILP of a choice; without a budget, that of the smallest peak. Bytes and seconds are in
    units of the largest of their kind. The budgets are reduced by `margin` of these units."""

    def __init__(self, offloaded: OffloadedStep, budget_bytes: int | None, margin: float) -> None:
        self._offloaded, self._margin = offloaded, margin
        step = offloaded.step
        options = [option for candidates in step.options_per_call for option in candidates]
        self._unit_s = max((option.time_s for option in options), default=0.0) or 1.0
        non_block_bytes = max((event.non_block_bytes for event in step.events), default=0)
        block_bytes = max((option.backward_bytes for option in options), default=0)
        self._unit_bytes = (non_block_bytes + block_bytes) or 1
        self.bound_s = 0.0
        self._problem = pulp.LpProblem("variants", pulp.LpMinimize)
        pairs = zip(step.options_per_call, offloaded.variants_per_call, strict=True)
        self._variants = [
            (*map(CallVariant, range(len(of_call))), *(v for v in variants if v.size_bytes))
            for of_call, variants in pairs
        ]
        self._selects = [
            [self._problem.add_variable(f"x{c}_{n}", 0, 1, pulp.LpInteger) for n in range(len(v))]
            for c, v in enumerate(self._variants)
        ]
        self._peak = self._problem.add_variable("peak", 0)
        self._rows = [
            (f"one{call}", dict.fromkeys(selects, 1.0), pulp.LpConstraintEQ, 1.0)
            for call, selects in enumerate(self._selects)
        ]
        costs: dict[pulp.LpVariable, float] = {}
        for call in range(len(self._selects)):
            times = self._terms(call, lambda c, v: offloaded.option(c, v).time_s / self._unit_s)
            costs |= times
        self._add_memory_rows(budget_bytes)
        self._add_host_row()
        costs |= dict.fromkeys(self._waiting_variables(), 1.0)
        pulp_versions.add_rows(self._problem, self._rows)
        objective = {self._peak: 1.0} if budget_bytes is None else costs
        self._problem.setObjective(expression(objective))

    def _terms(
        self, call: int, size: Callable[[int, CallVariant], float]
    ) -> dict[pulp.LpVariable, float]:
        """Return each variant's variable with its value of `size`."""
        pairs = zip(self._selects[call], self._variants[call], strict=True)
        return {x: size(call, variant) for x, variant in pairs}

    def _bytes(self, call: int, batches: int, *, is_on_host: bool) -> dict[pulp.LpVariable, float]:
        """Return the terms of the bytes that a call retains between forward and backward. While its
        tensors are on the host, and in the other `batches`, offloaded bytes do not count."""

        def size(c: int, variant: CallVariant) -> float:
            saved_bytes = self._offloaded.option(c, variant).saved_bytes
            remaining_bytes = saved_bytes - variant.size_bytes
            held_bytes = remaining_bytes if is_on_host else saved_bytes
            return (held_bytes + batches * remaining_bytes) / self._unit_bytes

        return self._terms(call, size)

    def _add_memory_rows(self, budget_bytes: int | None) -> None:
        step, stays = self._offloaded.step, host_stays(self._offloaded.step)
        batches = step.in_flight - 1
        limit = (budget_bytes or 0) / self._unit_bytes - self._margin
        pending: set[int] = set()  # calls between their forward and their backward
        on_host: set[int] = set()
        for number, event in enumerate(step.events):
            if event.kind == "backward":
                pending.discard(event.call)
                on_host -= {c for c, stay in stays.items() if stay.reloaded_before == event.call}
            terms: dict[pulp.LpVariable, float] = {}
            for call in range(len(step.options_per_call)):
                if call in pending:
                    terms |= self._bytes(call, batches, is_on_host=call in on_host)
                elif batches:
                    terms |= self._bytes(call, batches - 1, is_on_host=True)
            if event.kind != "outside":
                field = f"{event.kind}_bytes"
                running = self._terms(
                    event.call,
                    lambda c, v, field=field: (
                        getattr(self._offloaded.option(c, v), field) / self._unit_bytes
                    ),
                )
                for x, size in running.items():
                    terms[x] = terms.get(x, 0.0) + size
            capacity = -(event.non_block_bytes + step.other_batches_bytes) / self._unit_bytes
            if budget_bytes is None:
                terms[self._peak] = -1.0
            else:
                capacity += limit
            self._rows.append((f"at{number}", terms, pulp.LpConstraintLE, capacity))
            if event.kind == "forward":
                pending.add(event.call)
                on_host |= {c for c, stay in stays.items() if stay.released_after == event.call}

    def _add_host_row(self) -> None:
        host_bytes = self._offloaded.host_bytes
        if host_bytes is None:
            return
        unit_bytes = host_bytes or 1
        batches = self._offloaded.step.in_flight
        terms: dict[pulp.LpVariable, float] = {}
        for call in range(len(self._selects)):
            terms |= self._terms(call, lambda _, v: batches * v.size_bytes / unit_bytes)
        limit = host_bytes / unit_bytes - (self._margin if host_bytes else 0.0)
        self._rows.append(("host", terms, pulp.LpConstraintLE, limit))

    def _waiting_variables(self) -> list[pulp.LpVariable]:
        """Return a variable for each call and direction: the seconds of its copy beyond those of
        the call that runs meanwhile, at least."""
        link = self._offloaded.link
        waits: list[pulp.LpVariable] = []

        def backward_s(call: int, variant: CallVariant) -> float:
            option = self._offloaded.option(call, variant)
            return option.time_s - option.forward_s

        def forward_s(call: int, variant: CallVariant) -> float:
            return self._offloaded.option(call, variant).forward_s

        for call, stay in host_stays(self._offloaded.step).items():
            if not any(variant.size_bytes for variant in self._variants[call]):
                continue
            for name, rate, hiding, hidden_s in (
                ("leave", link.to_host_bytes_per_s, stay.released_after, forward_s),
                ("return", link.to_device_bytes_per_s, stay.reloaded_before, backward_s),
            ):
                wait = self._problem.add_variable(f"{name}{call}", 0)
                copies = self._terms(
                    call, lambda _, v, rate=rate: v.size_bytes / rate / self._unit_s
                )
                hides = self._terms(
                    hiding, lambda c, v, hidden_s=hidden_s: -hidden_s(c, v) / self._unit_s
                )
                terms = {**copies, **hides, wait: -1.0}
                self._rows.append((f"{name}{call}", terms, pulp.LpConstraintLE, 0.0))
                waits.append(wait)
        return waits

    def solve(self, threads: int) -> tuple[CallVariant, ...] | None:
        """Return the variants that the solver selects; None if it finds none in time."""
        solver = HighsSolver(gap=_GAP, time_limit=_TIME_LIMIT_S, threads=threads)
        result = solver.solve(pulp_versions.read_arrays(self._problem))
        self.bound_s = (result.bound or 0.0) * self._unit_s
        if result.objective is None:
            return None
        values = [[x.varValue or 0.0 for x in selects] for selects in self._selects]
        indices = [max(range(len(v)), key=v.__getitem__) for v in values]
        return tuple(v[index] for v, index in zip(self._variants, indices, strict=True))
