"""`CandidateLog`: the candidates for a step that were solved, and why each was taken or not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from remat.errors import InfeasibleBudget, SolverTimeout, one_line
from remat.limits.units import format_bytes
from remat.plan_data import CandidateResult, PlanData

logger = logging.getLogger("remat")

TAKEN = "taken"
"""The outcome of the candidate whose plan was returned."""

SLOWER, LARGER_PEAK, NOT_WORTHWHILE = "slower", "larger peak", "saves too little time"
"""The outcomes of candidates with plans that were not taken."""

_EQUAL_PEAKS = 0.01
"""For the budget "min", peaks that differ by at most this share count as equal."""

NoPlan = InfeasibleBudget | SolverTimeout
"""The errors of a candidate without a plan."""


@dataclass(frozen=True)
class _LogEntry:
    """A candidate that was solved. `refusal` says why it has no plan, or why its plan was refused
    later."""

    name: str
    plan: PlanData | None
    refusal: str
    is_estimate: bool


class CandidateLog:
    """The candidates that were solved for one plan, in the order of their solves."""

    def __init__(self) -> None:
        self._entries: list[_LogEntry] = []

    def __reduce__(self) -> tuple[type[CandidateLog], tuple[()]]:
        """Pickle no entries: torch's caches have the pickled options of Inductor as their key, and
        what was solved before decides no plan."""
        return CandidateLog, ()

    def add(self, name: str, result: PlanData | NoPlan, *, is_estimate: bool = False) -> None:
        """Add the result of a candidate: its plan, or the error that says why it has none.
        `is_estimate` is True for a quick solve, which a full one replaces."""
        kind = "estimate" if is_estimate else "candidate"
        if isinstance(result, PlanData):
            logger.debug("%s %s: %r", kind, name, result)
            self._entries.append(_LogEntry(name, result, "", is_estimate))
        else:
            logger.debug("%s %s: %s", kind, name, one_line(result))
            self._entries.append(_LogEntry(name, None, _reason_without_plan(result), is_estimate))

    def refuse(self, plan: PlanData, reason: str) -> None:
        """Record why a plan of the log cannot be taken, where that is found only after the choice.
        It is then the outcome of its candidate."""
        self._entries = [
            replace(entry, refusal=reason) if _has_plan(entry, plan) else entry
            for entry in self._entries
        ]

    def replace_plan(self, plan: PlanData, changed: PlanData) -> None:
        """Replace a plan of the log by a changed one, such as one whose time includes waiting for
        copies. Why it was refused is forgotten."""
        self._entries = [
            _LogEntry(entry.name, changed, "", entry.is_estimate) if entry.plan is plan else entry
            for entry in self._entries
        ]

    def results(self, taken: PlanData, *, is_min: bool) -> tuple[CandidateResult, ...]:
        """Return the result of each candidate, given the plan that was taken; () if fewer than two
        were solved. Of a candidate that has only estimates, this is the last one. `is_min` is True
        where the smallest peak was requested."""
        solved = {entry.name for entry in self._entries if not entry.is_estimate}
        last_estimates = {entry.name: entry for entry in self._entries if entry.is_estimate}
        entries = [
            entry
            for entry in self._entries
            if not entry.is_estimate
            or (entry.name not in solved and entry is last_estimates[entry.name])
        ]
        if len(entries) < 2:
            return ()
        is_taken = [not entry.refusal and _has_plan(entry, taken) for entry in entries]
        place = is_taken.index(True) if any(is_taken) else None
        return tuple(
            _candidate_result(
                entry, TAKEN if index == place else _reason_not_taken(entry, taken, is_min)
            )
            for index, entry in enumerate(entries)
        )


def _candidate_result(entry: _LogEntry, outcome: str) -> CandidateResult:
    if entry.plan is None:
        return CandidateResult(entry.name, outcome, is_estimate=entry.is_estimate)
    return CandidateResult(
        entry.name, outcome, entry.plan.peak_bytes, entry.plan.overhead, entry.is_estimate
    )


def _has_plan(entry: _LogEntry, plan: PlanData) -> bool:
    """True if an entry has this plan; terms and reasons may differ."""
    return entry.plan is not None and (
        (entry.plan.schedule, entry.plan.time_s, entry.plan.peak_bytes)
        == (plan.schedule, plan.time_s, plan.peak_bytes)
    )


def _reason_without_plan(error: NoPlan) -> str:
    """Return the outcome of a candidate without a plan, from its error."""
    if isinstance(error, SolverTimeout):
        return "no plan was found in time"
    if error.min_feasible_bytes is None:
        return "no plan fits the budget"
    least = "at least" if error.is_proved else "as far as known"
    return f"needs {format_bytes(error.min_feasible_bytes)} {least}"


def _reason_not_taken(entry: _LogEntry, taken: PlanData, is_min: bool) -> str:
    """Return why a candidate was not taken: why it has no plan, or in what the plan `taken` is
    better. `is_min` is True where the smallest peak was requested."""
    if entry.refusal or entry.plan is None:
        return entry.refusal
    if is_min and entry.plan.peak_bytes > (1 + _EQUAL_PEAKS) * taken.peak_bytes:
        return LARGER_PEAK
    return SLOWER if entry.plan.overhead > taken.overhead else NOT_WORTHWHILE
