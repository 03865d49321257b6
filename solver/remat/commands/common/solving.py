"""What the commands that solve share: how they end when they were interrupted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from remat.allocator.budget_fitting import solve_within_allocator_budget
from remat.commands.common.exits import code_of_signal, say, word
from remat.commands.common.interrupt import interruptible
from remat.commands.common.progress_line import Line, live
from remat.documents.trace import Trace
from remat.errors import SolverWarning
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.progress import Cancel
from remat.solve import solve
from remat.strategies.base import Strategy

_T = TypeVar("_T")


def solved(trace: Trace, budget: Budget, strategy: Strategy) -> tuple[Plan, int | None]:
    """The plan, and the signal that ended the solve early, if one did."""
    return attended(
        "solving",
        None,
        lambda line, cancel: solve_within_allocator_budget(
            trace,
            budget,
            lambda asked: solve(trace, asked, strategy, progress=line.solving, cancel=cancel),
            cancel=cancel,
        ),
    )


def attended(
    title: str, steps: int | None, work: Callable[[Line, Cancel], _T]
) -> tuple[_T, int | None]:
    """Work with a live line that signals end early; what solvers' failures have to say comes after
    the line."""
    with _heard(), live(title, steps) as line:
        ended = interruptible(lambda cancel: work(line, cancel))
    return ended.result, ended.signum


@contextmanager
def _heard() -> Iterator[None]:
    """Solver warnings within are said at the end, each once and on one line; others are as ever."""
    said: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", SolverWarning)
            yield
    finally:
        ours = [each for each in said if issubclass(each.category, SolverWarning)]
        for words in dict.fromkeys(str(each.message) for each in ours):
            say(" ".join(words.split()))
        for each in said:
            if each not in ours:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def finish(signum: int | None, what: str) -> None:
    """After everything was written and shown: the exit code of an interrupted command."""
    if signum is not None:
        say(f"{word(signum)}: this is {what}")
        raise typer.Exit(code_of_signal(signum))


def best_so_far(plan: Plan) -> str:
    """What an interrupted solve's plan is, in words."""
    if plan.gap is None:
        return "the best plan so far; nothing is proved about it"
    return f"the best plan so far, within {plan.gap:.2%} of the best possible time"


def hint(output: Path | None, as_json: bool, what: str, name: str) -> None:
    """Say how to keep what was made and only shown."""
    if output is None and not as_json:
        say(f"this {what} is not kept: -o {name} writes it, --json prints it")
