"""Solves with a progress line on stderr, until the solve ends or a signal interrupts it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from remat.allocator.budget_fitting import solve_within_allocator_budget
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.step import solve_step_in_time
from remat.choice.step_clock import StepClock
from remat.choice.trace_plan import TracePlan
from remat.commands.common.exits import describe_signal, print_message, signal_exit_code
from remat.commands.common.interrupt import run_interruptibly
from remat.commands.common.progress_line import ProgressLine, show_progress
from remat.documents.trace import Trace
from remat.errors import BudgetWarning, SolverWarning
from remat.limits.budget import Budget
from remat.limits.infeasible import plan_or_smallest
from remat.limits.limits import Limits
from remat.plan import Plan
from remat.plan_data import with_reserve_stat
from remat.progress import Cancel
from remat.solve import solve
from remat.strategies.base import Strategy

_T = TypeVar("_T")

_MESSAGES = (SolverWarning, BudgetWarning)
"""The warnings that are printed as one line."""


def solve_trace(
    trace: Trace,
    limits: Limits,
    strategy: Strategy,
    pieces: tuple[int, ...],
    measure: Callable[[Trace], Trace],
    offload: OffloadLimits | None,
    infeasible: str,
) -> tuple[TracePlan, int | None]:
    """Return a plan within the limits with its trace, and the signal that ended the solve early
    (None without a signal).

    With `pieces`, operations of the trace are split into one of these numbers of pieces, to which
    `measure` adds costs; with `offload`, tensors may be offloaded within these limits. With
    `infeasible="smallest"`, the smallest peak replaces an infeasible budget.
    """

    def solve_in_full(
        trace: Trace, budget: Budget, line: ProgressLine, cancel: Cancel, clock: StepClock
    ) -> Plan:
        return solve_within_allocator_budget(
            trace,
            budget,
            lambda solver_budget: solve(
                trace,
                solver_budget,
                clock.next_strategy(),
                progress=line.on_solve_progress,
                cancel=cancel,
            ),
            cancel=cancel,
        )

    def work(line: ProgressLine, cancel: Cancel) -> TracePlan:
        return plan_or_smallest(
            lambda budget: solve_step_in_time(
                trace,
                budget,
                strategy,
                pieces=pieces,
                offload=offload,
                solve_in_full=lambda step, budget, clock: solve_in_full(
                    step, budget, line, cancel, clock
                ),
                measure=measure,
                cancel=cancel,
            ),
            limits.budget_after_reserve,
            infeasible,
            peak_bytes=lambda solved: solved.plan.peak_bytes + limits.reserve_bytes,
            requested=limits.budget,
        )

    with limits.infeasible_with_reserve():
        (traced, plan), signum = run_with_progress("solving", None, work)
    return TracePlan(traced, with_reserve_stat(plan, limits.reserve_bytes)), signum


def run_with_progress(
    title: str, steps: int | None, work: Callable[[ProgressLine, Cancel], _T]
) -> tuple[_T, int | None]:
    """Run interruptible work below a progress line; return its result and the signal, if any.

    `work` gets the line and the event that cancels it. Warnings about failed solvers and infeasible
    budgets are printed after the line.
    """
    with warnings_as_messages(), show_progress(title, steps) as line:
        outcome = run_interruptibly(lambda cancel: work(line, cancel))
    return outcome.result, outcome.signum


@contextmanager
def warnings_as_messages() -> Iterator[None]:
    """Print each `SolverWarning` and `BudgetWarning` of the context at its end, once, as a line on
    stderr. Other warnings are shown as usual."""
    recorded: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as recorded:
            for category in _MESSAGES:
                warnings.simplefilter("always", category)
            yield
    finally:
        messages = [item for item in recorded if issubclass(item.category, _MESSAGES)]
        for text in dict.fromkeys(str(item.message) for item in messages):
            print_message(" ".join(text.split()))
        for item in recorded:
            if item not in messages:
                warnings.showwarning(item.message, item.category, item.filename, item.lineno)


def exit_if_interrupted(signum: int | None, result: str) -> None:
    """Exit with the code of an interrupted command if there was a signal; `result` describes what
    was written and printed."""
    if signum is not None:
        print_message(f"{describe_signal(signum)}: this is {result}")
        raise typer.Exit(signal_exit_code(signum))


def describe_incumbent(plan: Plan) -> str:
    """Describe the plan of an interrupted solve, with its proved gap."""
    if plan.gap is None:
        return "the best plan so far; no bound is proved"
    return f"the best plan so far, within {plan.gap:.2%} of the best possible time"


def hint_how_to_save(output: Path | None, as_json: bool, document: str, name: str) -> None:
    """Print how to save a document, if the command only printed a summary of it."""
    if output is None and not as_json:
        print_message(
            f"the {document} was not saved: use -o {name} to write it, or --json to print it"
        )
