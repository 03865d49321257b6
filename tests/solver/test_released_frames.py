"""An error of remat's, once handled, releases the frames that it passed through.

A frame in a reference cycle with an error keeps its variables, and those of all its callers, until
the garbage collector runs: the tensors of a training step whose planning failed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from tests.helpers.graphs import chain
from tests.helpers.search_states import SlotSource, fail_with_bug, search_state_of

import remat
from remat.errors import SolverWarning
from remat.strategies.registry import STRATEGIES
from remat.strategies.search.step import SearchStep, run_steps

GRAPH = chain(8)


class Variable:
    """The value of a caller's local variable."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_released(function: Callable[[], object]) -> bool:
    """True if no frame of a caller survives a function and its error."""

    def caller() -> weakref.ref[Variable]:
        variable = Variable()
        with suppress(Exception):
            function()
        return weakref.ref(variable)

    return caller()() is None


def test_a_frame_is_seen_that_survives() -> None:
    """The check can fail: this error is in a cycle with the frame that raises it."""

    def raise_from_a_variable() -> None:
        error = ZeroDivisionError()
        raise error

    assert not is_released(raise_from_a_variable)


@pytest.mark.parametrize("name", STRATEGIES)
def test_infeasible_budgets(name: str) -> None:
    strategy = STRATEGIES[name]()
    assert is_released(lambda: remat.solve(GRAPH, 1, strategy))


def test_errors_of_the_progress_callback() -> None:
    def progress(_: remat.Progress) -> None:
        raise ZeroDivisionError

    assert is_released(lambda: remat.solve(GRAPH, 5, remat.Auto(), progress=progress))


@pytest.mark.parametrize("is_concurrent", [False, True])
@pytest.mark.parametrize("must_succeed", [False, True])
def test_errors_of_steps(must_succeed: bool, is_concurrent: bool) -> None:
    step = SearchStep(
        "buggy", fail_with_bug, is_concurrent=is_concurrent, must_succeed=must_succeed
    )
    state = search_state_of(GRAPH, SlotSource(), 5)

    def run() -> None:
        with pytest.warns(SolverWarning):
            run_steps([step], state)

    def run_without_warning() -> None:
        run_steps([step], state)

    assert is_released(run_without_warning if must_succeed else run)


PULP = """
import gc, weakref

class Variable:
    pass

def first_import():
    variable = Variable()
    import remat
    return weakref.ref(variable)

reference = first_import()
gc.collect()
assert reference() is None
"""


@pytest.mark.slow
def test_the_function_that_imports_remat() -> None:
    """PuLP stores the import errors of solvers that are not installed, for good."""
    subprocess.run([sys.executable, "-c", PULP], check=True)
