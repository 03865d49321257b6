"""The progress of a command, as one live line on stderr if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from remat.progress import Progress
from remat.report.solve_progress import format_progress
from remat.view.drawing.text import plain

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


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
            description = plain(f"{self._title} {name}")
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
            self._bars.update(self._task, description=plain(text))


@contextmanager
def show_progress(title: str, steps: int | None = None) -> Iterator[ProgressLine]:
    """Show a line with the elapsed time and, if the number of `steps` is given, a bar."""
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
