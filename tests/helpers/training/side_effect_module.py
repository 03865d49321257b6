"""A helper module with state of its own, which the models of `side_effects` change."""

from __future__ import annotations

import io
import itertools
import threading
from typing import Any, ClassVar

CALLS = 0
ROWS: list[int] = []
STREAM = io.StringIO()
NUMBERS = itertools.count()
LOCAL = threading.local()


class Registry:
    """A class that counts for all callers."""

    calls: ClassVar[int] = 0
    seen: ClassVar[list[int]] = []

    @classmethod
    def count(cls) -> int:
        cls.calls += 1
        cls.seen.append(cls.calls)
        return cls.calls


class Meter:
    """An object that counts."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks


METER = Meter()


def count() -> int:
    """Count in global variables of this module."""
    global CALLS
    CALLS += 1
    ROWS.append(CALLS)
    return CALLS


def count_below() -> int:
    """Count by a function that the caller's code does not name."""
    return count()


def count_in_default(calls: list[int] = []) -> int:  # noqa: B006
    """Count in a default argument."""
    calls.append(1)
    return len(calls)


def count_in_attribute() -> int:
    """Count in an attribute of this function."""
    function: Any = count_in_attribute
    function.calls = getattr(function, "calls", 0) + 1
    return function.calls


def reset() -> None:
    """Forget all calls."""
    global CALLS, NUMBERS
    CALLS, NUMBERS = 0, itertools.count()
    ROWS.clear()
    STREAM.seek(0)
    STREAM.truncate()
    vars(LOCAL).clear()
    Registry.calls = 0
    Registry.seen.clear()
    METER.ticks = 0
    defaults: Any = count_in_default.__defaults__
    defaults[0].clear()
    vars(count_in_attribute).clear()
