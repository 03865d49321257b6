"""Choice of an option for each block call, and of the saved tensors that it offloads to the host.

A MILP with a binary for each variant of each call, and a row for each event of the step: the memory
in use outside of blocks, what earlier calls saved, and what the running block needs are at most the
budget. It is a multiple-choice knapsack in which every prefix of the calls has its own capacity.

Offloaded bytes do not count in the events between their release and their reload. A copy runs while
exactly one other call computes: the step waits for the part of the copy that takes longer than that
call, a variable for each call and direction. Its rows are linear, and exact for the simulator
(`BlockStep.outcome`), since a call's copy starts when the previous call's copy has ended.

Executors that take one setting for all blocks have few settings: each of them is evaluated. Under
the rules of other checkpointing libraries a block is recomputed as a whole before its backward,
except for the outputs that it saved: whatever is not saved is recomputed once, needed or not. So
`selections_to_save` solves a knapsack for one block: each candidate saves its time and takes its
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from remat.blockwise.block_step import BlockStep, CallVariant, StepOutcome, host_stays
from remat.errors import InfeasibleBudget
from remat.limits.budget import missing_percent_sign_hint
from remat.limits.units import format_bytes
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import AT_MOST, EQUAL, Column, Program

_GAP = 1e-3
_TIME_LIMIT_S = 10.0
_TOLERANCES = (0.0, 2e-6, 2e-5)
"""Amounts, in units of the program, by which the budgets are lowered, one after another, until the
solver's tolerance violates no row."""

_LEAST_GAIN = 1e-3
"""The share of the step's time that offloading must save, at least."""

NEAR_MINIMUM_FACTOR = 1.01
"""Budget of "min", relative to the smallest peak. At exactly the smallest peak a step is much
slower than with one percent more memory."""

ExecutorSetting = tuple[int, ...]
"""The option index of each call under one setting of an executor that applies to all blocks."""


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """The variant that each call runs in, with the step's outcome. No choice that fits the budget,
    with offloading or without, is faster than `bound_s`."""

    variants: tuple[CallVariant, ...]
    outcome: StepOutcome
    bound_s: float

    @property
    def option_indices(self) -> tuple[int, ...]:
        """The index of the option of each call."""
        return tuple(variant.option for variant in self.variants)


def choose_options(
    step: BlockStep,
    budget_bytes: int | None,
    threads: int = 2,
    tied: Sequence[int] | None = None,
) -> OptionChoice:
    """Return the fastest choice with a peak of at most `budget_bytes`.

    The choice without offloading is returned unless another is faster, or it does not fit. Without
    a budget, the peak may be one percent above the smallest one. If `tied` is given, call `c` must
    use the same option as call `tied[c]`.

    Raises `InfeasibleBudget` with the smallest peak if no choice fits.
    """
    tied = tied or range(len(step.options_per_call))
    if budget_bytes is None:
        smallest = _smallest_choice(step, threads, tied)
        budget_bytes = int(NEAR_MINIMUM_FACTOR * smallest.outcome.peak_bytes)
    without = _fastest_choice(replace(step, host=None), budget_bytes, threads, tied)
    if step.host is None or (without and without.option_indices == fastest_options(step)):
        best = without
    else:
        best = _fastest_choice(step, budget_bytes, threads, tied)
        if without is not None and best is None:
            return replace(without, bound_s=0.0)
        if without is not None and best is not None:
            without_s = without.outcome.time_s
            if best.outcome.time_s > (1 - _LEAST_GAIN) * without_s:
                return replace(without, bound_s=min(best.bound_s, without_s))
    if best is None:
        best = _smallest_choice(
            step, threads, tied
        )  # the solver may find it, but not for the budget
        check_budget_feasible(best.outcome.peak_bytes, budget_bytes)
    return best


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
    return _smallest_choice(step, threads, range(len(step.options_per_call))).outcome.peak_bytes


def fastest_options(step: BlockStep) -> tuple[int, ...]:
    """Return the index of the fastest option of each call, regardless of memory."""
    return tuple(
        min(range(len(options)), key=lambda index: options[index].time_s)
        for options in step.options_per_call
    )


def _least_saving_variants(step: BlockStep, tied: Sequence[int]) -> tuple[CallVariant, ...]:
    """Return the option of each call that saves the fewest bytes, without copies. Call `c` has that
    of call `tied[c]`."""
    smallest = [
        min(range(len(o)), key=lambda index: (o[index].saved_bytes, o[index].backward_bytes))
        for o in step.options_per_call
    ]
    return tuple(CallVariant(smallest[other]) for other in tied)


def _smallest_choice(step: BlockStep, threads: int, tied: Sequence[int]) -> OptionChoice:
    """Return the choice with the smallest peak that the solver finds in time; if it finds none, the
    options that save least."""
    candidates = [_least_saving_variants(step, tied)]
    if step.host is not None:
        candidates.append(_smallest_choice(replace(step, host=None), threads, tied).variants)
    for tolerance in _TOLERANCES:
        variants = _BlockChoiceProgram(step, None, tolerance, tied).select(threads)
        if variants is None:
            break
        if _fits_host(step, step.outcome(variants)):
            candidates.append(variants)
            break
    variants = min(candidates, key=lambda c: step.outcome(c).peak_bytes)
    return OptionChoice(variants, step.outcome(variants), 0.0)


def _fastest_choice(
    step: BlockStep, budget_bytes: int, threads: int, tied: Sequence[int]
) -> OptionChoice | None:
    """Return the fastest choice within a budget, without copies that save no time; None if the
    solver finds none in time."""
    fastest = fastest_options(step)
    if all(fastest[call] == fastest[other] for call, other in enumerate(tied)):
        variants = tuple(map(CallVariant, fastest))
        outcome = step.outcome(variants)
        if outcome.peak_bytes <= budget_bytes:
            return OptionChoice(variants, outcome, outcome.time_s)
    bound_s = 0.0
    for tolerance in _TOLERANCES:
        program = _BlockChoiceProgram(step, budget_bytes, tolerance, tied)
        selected = program.select(threads)
        if not tolerance:
            bound_s = program.bound_s
        variants = _least_saving_variants(step, tied) if selected is None else selected
        outcome = step.outcome(variants)
        if outcome.peak_bytes <= budget_bytes and _fits_host(step, outcome):
            variants = _without_needless_offloading(step, variants, budget_bytes)
            outcome = step.outcome(variants)
            return OptionChoice(variants, outcome, min(bound_s, outcome.time_s))
        if selected is None:
            break
    return None


def _fits_host(step: BlockStep, outcome: StepOutcome) -> bool:
    """True if the host has room for what is offloaded, or has no limit."""
    limit_bytes = None if step.host is None else step.host.host_bytes
    return limit_bytes is None or outcome.host_bytes <= limit_bytes


def _without_needless_offloading(
    step: BlockStep, variants: tuple[CallVariant, ...], budget_bytes: int
) -> tuple[CallVariant, ...]:
    """Return the choice with fewer offloaded bytes, where the budget and the time allow that. To
    the program hidden copies are free: it has no reason to leave them out."""
    time_s = step.outcome(variants).time_s
    for call, variant in enumerate(variants):
        smaller = [
            v
            for v in step.variants(call)
            if v.option == variant.option and v.size_bytes < variant.size_bytes
        ]
        for replacement in sorted(smaller, key=lambda v: v.size_bytes):
            changed = (*variants[:call], replacement, *variants[call + 1 :])
            outcome = step.outcome(changed)
            if outcome.peak_bytes <= budget_bytes and outcome.time_s <= time_s:
                variants = changed
                break
    return variants


class _BlockChoiceProgram:
    """The MILP of a choice; without a budget, its objective is the peak. Bytes and seconds are in
    units of the largest of their kind. The budgets are reduced by `margin` of these units."""

    def __init__(
        self, step: BlockStep, budget_bytes: int | None, margin: float, tied: Sequence[int]
    ) -> None:
        self._step, self._margin = step, margin
        options = [option for candidates in step.options_per_call for option in candidates]
        self._unit_s = max((option.time_s for option in options), default=0.0) or 1.0
        non_block_bytes = max((event.non_block_bytes for event in step.events), default=0)
        block_bytes = max((option.backward_bytes for option in options), default=0)
        self._unit_bytes = (non_block_bytes + block_bytes) or 1
        self.bound_s = 0.0
        self._program = Program()
        self._variants = [step.variants(call) for call in range(len(step.options_per_call))]
        self._selects = [
            [self._program.add_binary(f"x{c}_{n}") for n in range(len(v))]
            for c, v in enumerate(self._variants)
        ]
        self._peak = self._program.add_column("peak")
        for selects in self._selects:
            self._program.add_row(dict.fromkeys(selects, 1.0), EQUAL, 1.0)
        self._add_ties(tied)
        costs: dict[Column, float] = {}
        for call in range(len(self._selects)):
            times = self._variant_terms(call, lambda c, v: step.option(c, v).time_s / self._unit_s)
            costs |= times
        self._add_memory_rows(budget_bytes)
        self._add_host_row()
        costs |= dict.fromkeys(self._waiting_variables(), 1.0)
        self._program.costs = {self._peak: 1.0} if budget_bytes is None else costs

    def _add_ties(self, tied: Sequence[int]) -> None:
        for call, other in enumerate(tied):
            pairs = zip(self._selects[call], self._selects[other], strict=True)
            for x, y in pairs if call != other else ():
                self._program.add_row({x: 1.0, y: -1.0}, EQUAL, 0.0)

    def _variant_terms(
        self, call: int, size: Callable[[int, CallVariant], float]
    ) -> dict[Column, float]:
        """Return the value of `size(call, variant)` for each variant's variable."""
        pairs = zip(self._selects[call], self._variants[call], strict=True)
        return {x: size(call, variant) for x, variant in pairs}

    def _retained_terms(self, call: int, batches: int, *, is_on_host: bool) -> dict[Column, float]:
        """Return the terms of the bytes that a call retains between forward and backward. While its
        tensors are on the host, and in the other `batches`, offloaded bytes do not count."""

        def size(c: int, variant: CallVariant) -> float:
            saved_bytes = self._step.option(c, variant).saved_bytes
            remaining_bytes = saved_bytes - variant.size_bytes
            held_bytes = remaining_bytes if is_on_host else saved_bytes
            return (held_bytes + batches * remaining_bytes) / self._unit_bytes

        return self._variant_terms(call, size)

    def _add_memory_rows(self, budget_bytes: int | None) -> None:
        step, stays = self._step, host_stays(self._step)
        batches = step.in_flight - 1
        limit = (budget_bytes or 0) / self._unit_bytes - self._margin
        pending: set[int] = set()  # calls between their forward and their backward
        on_host: set[int] = set()
        for event in step.events:
            if event.kind == "backward":
                pending.discard(event.call)
                on_host -= {c for c, stay in stays.items() if stay.reloaded_before == event.call}
            terms: dict[Column, float] = {}
            for call in range(len(step.options_per_call)):
                if call in pending:
                    terms |= self._retained_terms(call, batches, is_on_host=call in on_host)
                elif batches:
                    terms |= self._retained_terms(call, batches - 1, is_on_host=True)
            if event.kind != "outside":
                field = f"{event.kind}_bytes"
                running = self._variant_terms(
                    event.call,
                    lambda c, v, field=field: (
                        getattr(self._step.option(c, v), field) / self._unit_bytes
                    ),
                )
                for x, size in running.items():
                    terms[x] = terms.get(x, 0.0) + size
            capacity = -(event.non_block_bytes + step.other_batches_bytes) / self._unit_bytes
            if budget_bytes is None:
                terms[self._peak] = -1.0
            else:
                capacity += limit
            self._program.add_row(terms, AT_MOST, capacity)
            if event.kind == "forward":
                pending.add(event.call)
                on_host |= {c for c, stay in stays.items() if stay.released_after == event.call}

    def _add_host_row(self) -> None:
        host_bytes = None if self._step.host is None else self._step.host.host_bytes
        if host_bytes is None:
            return
        unit_bytes = host_bytes or 1
        batches = self._step.in_flight
        terms: dict[Column, float] = {}
        for call in range(len(self._selects)):
            terms |= self._variant_terms(call, lambda _, v: batches * v.size_bytes / unit_bytes)
        limit = host_bytes / unit_bytes - (self._margin if host_bytes else 0.0)
        self._program.add_row(terms, AT_MOST, limit)

    def _waiting_variables(self) -> list[Column]:
        """Add a variable for each call and direction, at least the seconds by which its copy takes
        longer than the call that runs meanwhile, and return them; none if nothing may be
        offloaded."""
        if self._step.host is None:
            return []
        link = self._step.host.link
        waits: list[Column] = []

        def backward_s(call: int, variant: CallVariant) -> float:
            option = self._step.option(call, variant)
            return option.time_s - option.forward_s

        def forward_s(call: int, variant: CallVariant) -> float:
            return self._step.option(call, variant).forward_s

        for call, stay in host_stays(self._step).items():
            if not any(variant.size_bytes for variant in self._variants[call]):
                continue
            for name, rate, hiding, hidden_s in (
                ("leave", link.to_host_bytes_per_s, stay.released_after, forward_s),
                ("return", link.to_device_bytes_per_s, stay.reloaded_before, backward_s),
            ):
                wait = self._program.add_column(f"{name}{call}")
                copies = self._variant_terms(
                    call, lambda _, v, rate=rate: v.size_bytes / rate / self._unit_s
                )
                hides = self._variant_terms(
                    hiding, lambda c, v, hidden_s=hidden_s: -hidden_s(c, v) / self._unit_s
                )
                self._program.add_row({**copies, **hides, wait: -1.0}, AT_MOST, 0.0)
                waits.append(wait)
        return waits

    def select(self, threads: int) -> tuple[CallVariant, ...] | None:
        """Return the variants that the solver selects, and set `bound_s`; None if it finds none in
        time."""
        solver = HighsSolver(gap=_GAP, time_limit=_TIME_LIMIT_S, threads=threads)
        result = solver.run(self._program.arrays())
        self.bound_s = (result.bound or 0.0) * self._unit_s
        if result.objective is None:
            return None
        values = [[x.value or 0.0 for x in selects] for selects in self._selects]
        indices = [max(range(len(v)), key=v.__getitem__) for v in values]
        return tuple(v[index] for v, index in zip(self._variants, indices, strict=True))


_LIMIT_FRACTIONS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Limits of the saved bytes, as fractions of the bytes of all candidates."""

_SELECTION_TIME_LIMIT_S = 1.0


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


def selections_to_save(candidates: Sequence[SaveCandidate]) -> list[frozenset[int]]:
    """Return the sets of candidates to save, by index, that save the most recomputation time for a
    range of memory limits, the smallest limit first."""
    total_bytes = sum(c.size_bytes for c in candidates)
    selections: dict[frozenset[int], None] = {}
    for fraction in _LIMIT_FRACTIONS:
        selections[_best_outputs_to_save(candidates, round(fraction * total_bytes))] = None
    selections.pop(frozenset(), None)
    return list(selections)


def _best_outputs_to_save(candidates: Sequence[SaveCandidate], limit_bytes: int) -> frozenset[int]:
    """Return the candidates to save within `limit_bytes`, by index: the optimum of the knapsack;
    none if the solver finds none in time."""
    program = Program()
    is_saved = [program.add_binary(f"x{index}") for index in range(len(candidates))]
    unit_bytes, unit_s = max(limit_bytes, 1), math.fsum(c.time_s for c in candidates) or 1.0
    sizes = {x: c.size_bytes / unit_bytes for x, c in zip(is_saved, candidates, strict=True)}
    program.add_row(sizes, AT_MOST, limit_bytes / unit_bytes)
    for x, candidate in zip(is_saved, candidates, strict=True):
        for other in candidate.needs:
            program.add_row({x: 1.0, is_saved[other]: -1.0}, AT_MOST, 0.0)
        for other in candidate.excludes:
            program.add_row({x: 1.0, is_saved[other]: 1.0}, AT_MOST, 1.0)
        program.costs[x] = -candidate.time_s / unit_s
    HighsSolver(gap=_GAP, time_limit=_SELECTION_TIME_LIMIT_S, threads=2).run(program.arrays())
    return frozenset(index for index, x in enumerate(is_saved) if x.is_one)
