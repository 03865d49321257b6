"""Telling the user how far a measurement is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (done, total, name of what comes next)."""


@contextmanager
def reporter(progress: Progress | bool | None) -> Iterator[Progress]:
    """The function to call: the caller's own, a bar on stderr for True, or one that is silent."""
    if callable(progress):
        yield progress
    elif progress is True and sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _silent


def _silent(done: int, total: int, name: str) -> None:
    """Report nothing."""


@contextmanager
def _bar() -> Iterator[Progress]:
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield _silent
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, description=f"measuring {name}"
        )
