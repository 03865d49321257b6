"""A progress line on the terminal while a step is planned.

The line appears after two seconds (at once with `progress=True`) if stderr is a terminal, and is
erased at the end. `progress=False` or the environment variable `REMAT_PROGRESS=0` turns it off.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from remat.progress import Progress, ProgressCallback
from remat.report.solve_progress import format_progress

ENVIRONMENT_VARIABLE = "REMAT_PROGRESS"
"""The environment variable whose value "0" turns the line off."""

_DELAY_S = 2.0
"""The time after which the line appears."""

_INTERVAL_S = 0.5
_ERASE_LINE = "\r\x1b[2K"
_MAX_COLUMNS = 79


@contextmanager
def planning_line(progress: ProgressCallback | bool | None) -> Iterator[ProgressCallback | None]:
    """Yield the progress callback for solves inside of this context: the user's, or one that shows
    the line. Yield None if the line is off or stderr is no terminal."""
    if callable(progress):
        yield progress
    elif progress is False or os.environ.get(ENVIRONMENT_VARIABLE) == "0" or not _is_terminal():
        yield None
    else:
        line = _ProgressLine(0.0 if progress else _DELAY_S)
        try:
            yield line.report
        finally:
            line.close()


def _is_terminal() -> bool:
    """True if stderr is a terminal; a program without a console has no stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


class _ProgressLine:
    """The line, written by a separate thread, because captures and measurements do not report."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._start_s = time.monotonic()
        self._text = ""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._show_until_closed, name="remat-progress", daemon=True
        )
        self._thread.start()

    def report(self, progress: Progress) -> None:
        """Show the progress of a solve from now on."""
        self._text = f": {format_progress(progress)}"

    def close(self) -> None:
        """Erase the line."""
        self._is_closed.set()
        self._thread.join()

    def _show_until_closed(self) -> None:
        """Write the line after the delay, then twice a second until it is closed."""
        if self._is_closed.wait(self._delay_s):
            return
        while True:
            text = f"remat: planning the step, {time.monotonic() - self._start_s:.0f} s{self._text}"
            _write_to_stderr(f"{_ERASE_LINE}{text[:_MAX_COLUMNS]}")
            if self._is_closed.wait(_INTERVAL_S):
                break
        _write_to_stderr(_ERASE_LINE)


def _write_to_stderr(text: str) -> None:
    """Write to stderr. Ignore the error of a closed terminal, so that planning continues."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return
