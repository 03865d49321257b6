"""Solves with a progress line on stderr, until the solve ends or a signal interrupts it.

Solvers run in C, and Python's signal handlers run only in the main thread. So the work runs in
another thread while the main thread waits. The first signal sets the work's `cancel`, so that the
command continues with the best result so far; the second one exits immediately.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import typer

from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import TracePlan
from remat.choice.step import plan_step
from remat.commands.common.exits import (
    ImmediateExit,
    InterruptedWithoutResult,
    describe_signal,
    print_message,
    signal_exit_code,
)
from remat.costs.trace_costs import roofline_of, with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import BudgetWarning, RematError, SolverWarning
from remat.plan import Plan
from remat.plan_options import CheckedOptions
from remat.progress import Cancel, Progress
from remat.report.solve_progress import format_progress
from remat.view.text import plain_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


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

    return host_limits(options.offload, trace, roofline_of(trace), None, runs_locally=is_here)


def with_costs_of_pieces(trace: Trace) -> Trace:
    """Return a trace with costs of its pieces, from the source of the others' costs."""
    if (roofline := roofline_of(trace)) is not None:
        return with_roofline_costs(trace, roofline)
    from remat.frontend.costs.measure import measure_pieces

    return measure_pieces(trace)


def plan_interruptibly(
    trace: Trace, options: CheckedOptions, *, is_here: bool
) -> tuple[TracePlan, int | None]:
    """Return the plan of a trace, and the signal that ended the solve early, or None. `is_here`
    says that the step runs on this machine."""
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
    """Run interruptible work below a progress line; return its result and the signal that cancelled
    it, or None.

    `work` gets the line and the event that cancels it. `steps` is the length of the line's bar,
    None for no bar. Warnings about failed solvers and infeasible budgets are printed after the
    line.
    """
    with warnings_as_messages(), show_progress(title, steps) as line:
        return run_interruptibly(lambda cancel: work(line, cancel))


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


_POLL_INTERVAL_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _CancelOnSignal:
    """Signal handler: the first signal sets `event`, the second one exits."""

    event: threading.Event = field(default_factory=threading.Event)
    signum: int | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise ImmediateExit(signum)
        self.signum = signum
        self.event.set()
        if sys.stderr.isatty():
            print_message(
                f"{describe_signal(signum)}: stopping with the best plan so far; interrupt once "
                "more to exit immediately"
            )


def run_interruptibly(work: Callable[[Cancel], _T]) -> tuple[_T, int | None]:
    """Run work in a thread until it ends or a signal cancels it; return its result and the signal,
    or None.

    Raises the work's exception, or `InterruptedWithoutResult` if a signal ended it before it had a
    result.
    """
    handler = _CancelOnSignal()
    results: list[_T] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def run() -> None:
        try:
            results.append(work(handler.event))
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    with _signals_handled_by(handler):
        threading.Thread(target=run, name="solve", daemon=True).start()
        # On some systems, a wait without a timeout does not notice signals.
        while not finished.wait(_POLL_INTERVAL_S):
            pass
    if results:
        return results[0], handler.signum
    error = errors[0]
    if handler.signum is not None and isinstance(error, RematError):
        raise InterruptedWithoutResult(
            handler.signum,
            f"{describe_signal(handler.signum)} before a plan was found; nothing was written",
        ) from error
    raise error


@contextmanager
def _signals_handled_by(new_handler: _CancelOnSignal) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM by a handler inside of this context; ignored signals stay
    ignored."""
    previous_handlers = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    for signum, handler in previous_handlers.items():
        if handler != signal.SIG_IGN:  # ignored under nohup
            signal.signal(signum, new_handler)
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


class ProgressLine:
    """A live line with a title and a description; prints nothing without a terminal."""

    def __init__(self, bars: Bars | None, task: TaskID | None, title: str) -> None:
        self._bars, self._task, self._title = bars, task, title

    def on_solve_progress(self, progress: Progress) -> None:
        """Show the progress of `remat.solve`, as its `progress` callback."""
        self.set_description(f"{self._title}: {format_progress(progress)}")

    def on_measure_progress(self, completed: int, total: int, name: str) -> None:
        """Show the progress of `remat.measure`, as its `progress` callback."""
        if self._bars is not None and self._task is not None:
            description = plain_text(f"{self._title} {name}")
            self._bars.update(
                self._task, completed=completed, total=max(1, total), description=description
            )

    def advance(self) -> None:
        """Advance the bar by one step."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task)

    def set_description(self, text: str) -> None:
        """Replace the text of the line."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, description=plain_text(text))


@contextmanager
def show_progress(title: str, steps: int | None = None) -> Iterator[ProgressLine]:
    """Show a line with the elapsed time and, if the number of `steps` is given, a bar; nothing if
    stderr is no terminal."""
    if not sys.stderr.isatty():
        yield ProgressLine(None, None, title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.progress import TimeElapsedColumn as Elapsed

    bar = [] if steps is None else [BarColumn(bar_width=20), MofNCompleteColumn()]
    description = TextColumn("{task.description}", markup=False)
    with Bars(
        SpinnerColumn(), *bar, Elapsed(), description, console=Console(stderr=True), transient=True
    ) as bars:
        yield ProgressLine(bars, bars.add_task(title, total=steps), title)
