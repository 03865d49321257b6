"""How far a command is: one live line on stderr where that is a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from remat.progress import Progress
from remat.report.standing import standing
from remat.view.drawing.text import plain

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Line:
    """The line; silent without a terminal."""

    def __init__(self, bars: Bars | None, task: TaskID | None, title: str) -> None:
        self._bars, self._task, self._title = bars, task, title

    def solving(self, progress: Progress) -> None:
        """As the `progress` of `remat.solve`."""
        self.tell(f"{self._title}: {standing(progress)}")

    def measuring(self, done: int, total: int, name: str) -> None:
        """As the `progress` of `remat.measure`."""
        if self._bars is not None and self._task is not None:
            description = plain(f"{self._title} {name}")
            self._bars.update(
                self._task, completed=done, total=max(1, total), description=description
            )

    def advance(self) -> None:
        """One more of the steps is done."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task)

    def tell(self, text: str) -> None:
        """Change the words."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, description=plain(text))


@contextmanager
def live(title: str, steps: int | None = None) -> Iterator[Line]:
    """A line with the time that has passed and, where the number of `steps` is known, a bar."""
    if not sys.stderr.isatty():
        yield Line(None, None, title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.progress import TimeElapsedColumn as Elapsed

    bar = [] if steps is None else [BarColumn(bar_width=20), MofNCompleteColumn()]
    words = TextColumn("{task.description}", markup=False)
    with Bars(
        SpinnerColumn(), *bar, Elapsed(), words, console=Console(stderr=True), transient=True
    ) as bars:
        yield Line(bars, bars.add_task(title, total=steps), title)
