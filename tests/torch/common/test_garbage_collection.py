"""The cyclic garbage collector while planning: what it leaves out, and that it is restored."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import remat
from remat.frontend.common.garbage_collection import (
    cycles_not_collected,
    older_objects_not_collected,
)


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """Undo what the suite does for all tests: it excludes the objects of collected tests."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cyclic:
    """An object that refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.self = self


def new_cycle() -> weakref.ref[Cyclic]:
    return weakref.ref(Cyclic())


def test_the_collector_is_off_within_the_context_and_restored_after_an_error() -> None:
    @cycles_not_collected()
    def fail() -> None:
        with cycles_not_collected():
            pass
        assert not gc.isenabled(), "a context within another one does not end it"
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert gc.isenabled()


def test_contexts_of_two_threads_may_overlap() -> None:
    """The collector belongs to the process: the thread that ends first restores nothing."""
    for context, is_restricted in (
        (cycles_not_collected, lambda: not gc.isenabled()),
        (older_objects_not_collected, lambda: gc.get_freeze_count() > 0),
    ):
        is_inside, may_end = threading.Event(), threading.Event()

        def other_thread(
            context: Callable[[], AbstractContextManager[None]] = context,
            events: tuple[threading.Event, threading.Event] = (is_inside, may_end),
        ) -> None:
            with context():
                events[0].set()
                assert events[1].wait(60)

        with context():
            thread = threading.Thread(target=other_thread)
            thread.start()
            assert is_inside.wait(60)
        assert is_restricted(), "the other thread is still inside"
        may_end.set()
        thread.join()
        assert not is_restricted()


def test_only_new_cycles_are_collected_within_the_context() -> None:
    older = new_cycle()

    @older_objects_not_collected()
    def fail() -> None:
        newer = new_cycle()
        with older_objects_not_collected():
            pass
        gc.collect()
        assert older() is not None
        assert newer() is None
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    gc.collect()
    assert older() is None


def test_objects_that_the_caller_has_frozen_stay_frozen() -> None:
    gc.freeze()
    try:
        with older_objects_not_collected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_planning_restores_the_collector_after_an_error() -> None:
    with pytest.raises(remat.InfeasibleBudget):
        remat.optimize(
            nn.Linear(3, 3), "1B", example_inputs=(torch.ones(2, 3),), costs=remat.Roofline("cpu")
        )
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
