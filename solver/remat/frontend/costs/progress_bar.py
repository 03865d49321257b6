"""Progress of a measurement: a callback of the caller, or a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

MeasureProgress: TypeAlias = Callable[[int, int, str], None]
"""A callback that receives the number of measured operations, their total, and the next one's
name."""


@contextmanager
def progress_reporter(progress: MeasureProgress | bool | None) -> Iterator[MeasureProgress]:
    """Yield the function to report progress to: the caller's, one that updates a bar on stderr for
    True, or one that does nothing."""
    if callable(progress):
        yield progress
    elif progress is True and sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _ignore_progress


def _ignore_progress(completed: int, total: int, name: str) -> None:
    """Report nothing."""


@contextmanager
def _bar() -> Iterator[MeasureProgress]:
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield _ignore_progress
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda completed, total, name: bar.update(
            task, completed=completed, total=total, description=f"measuring {name}"
        )
