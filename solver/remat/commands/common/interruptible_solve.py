"""Solves with a progress line on stderr, until the solve ends or a signal interrupts it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.step import plan_step
from remat.choice.trace_plan import TracePlan
from remat.commands.common.exits import describe_signal, print_message, signal_exit_code
from remat.commands.common.interrupt import run_interruptibly
from remat.commands.common.progress_line import ProgressLine, show_progress
from remat.costs.trace_costs import roofline_of, with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import BudgetWarning, SolverWarning
from remat.plan import Plan
from remat.plan_options import CheckedOptions
from remat.progress import Cancel

_T = TypeVar("_T")

_MESSAGES = (SolverWarning, BudgetWarning)
"""The warnings that are printed as one line."""


def offload_limits(options: CheckedOptions, trace: Trace, *, is_here: bool) -> OffloadLimits | None:
    """Return the limits of offloading for a trace; None if nothing may be offloaded. The bandwidth
    comes from where the costs of the trace came from: a data sheet, or this machine. `is_here` says
    that the step runs on this machine."""
    if options.offload is None:
        return None
    from remat.frontend.planning.host_limits import host_limits

    return host_limits(options.offload, trace, roofline_of(trace), None, is_here=is_here)


def with_costs_of_pieces(trace: Trace) -> Trace:
    """Return a trace with costs of its pieces, from the source of the others' costs."""
    if (roofline := roofline_of(trace)) is not None:
        return with_roofline_costs(trace, roofline)
    from remat.frontend.costs.measure import measure_pieces

    return measure_pieces(trace)


def plan_interruptibly(
    trace: Trace, options: CheckedOptions, *, is_here: bool
) -> tuple[TracePlan, int | None]:
    """Return the plan of a trace, and the signal that ended the solve early, if any. `is_here` is
    as for `offload_limits`."""
    request = options.request(options.fixed_limits, offload_limits(options, trace, is_here=is_here))

    def work(line: ProgressLine, cancel: Cancel) -> TracePlan:
        return plan_step(
            trace,
            request,
            measure=with_costs_of_pieces,
            progress=line.on_solve_progress,
            cancel=cancel,
        )

    return run_with_progress("solving", None, work)


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
