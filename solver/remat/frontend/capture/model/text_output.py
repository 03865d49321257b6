"""Text that a forward prints or logs, which a planned step does not write."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from remat.frontend.capture.model.reached_code import is_user_module

log = logging.getLogger("remat")

_reported_lines: set[str] = set()
"""Lines of code whose output was reported. Each capture runs them, and one warning is enough."""


class _ObservedStream:
    """A stream that calls `note` before each write."""

    def __init__(self, stream: Any, note: Any) -> None:
        self._stream = stream
        self._note = note

    def write(self, text: str) -> Any:
        self._note("prints")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def text_output_reported(model: nn.Module) -> Iterator[None]:
    """Log a warning if the user's code prints or logs in this context: a plan does not run this
    code. Libraries are left out, because most of their messages appear once."""
    thread = threading.get_ident()
    lines: dict[str, str] = {}

    def note(action: str) -> None:
        if threading.get_ident() == thread and (line := _user_line(sys._getframe(2))):
            lines.setdefault(line, action)

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        note("logs")
        original_handle(logger, record)

    original_handle = logging.Logger.handle
    streams = sys.stdout, sys.stderr
    observed = tuple(_ObservedStream(stream, note) if stream else stream for stream in streams)
    logging.Logger.handle = handle  # type: ignore[method-assign]
    sys.stdout, sys.stderr = observed
    try:
        yield
    finally:
        logging.Logger.handle = original_handle  # type: ignore[method-assign]
        if sys.stdout is observed[0]:
            sys.stdout = streams[0]
        if sys.stderr is observed[1]:
            sys.stderr = streams[1]
    for line, action in lines.items():
        if line not in _reported_lines:
            _reported_lines.add(line)
            log.warning(
                "the forward of %s %s a text at %s: planning runs this code, and planned steps do "
                "not. Remedy: put it outside of the forward or, with "
                'scope="blocks", into the code around the blocks',
                type(model).__name__,
                action,
                line,
            )


def _user_line(frame: FrameType | None) -> str:
    """Return the line of the user's code that calls functions of Python, such as `print` or those
    of `logging`; "" if the caller is a package."""
    while frame is not None and _package(frame) in sys.stdlib_module_names - {"__main__"}:
        frame = frame.f_back
    if frame is None or not is_user_module(frame.f_globals):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} (in {frame.f_code.co_name})"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]
