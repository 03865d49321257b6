"""Documents in and out: files, gzipped or not, and `-` for stdin.

What a command is to write is checked before it begins, as a solve may take an hour.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from remat.commands.common.exits import UsageError
from remat.documents.base import MAX_BYTES, parse_plain_json, write_atomically
from remat.documents.sweep import SweepDocument
from remat.documents.trace import Trace
from remat.errors import DocumentError, RematError
from remat.plan import Plan
from remat.view.drawing.text import plain

_T = TypeVar("_T")

_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]")


def read_trace(path: str) -> Trace:
    """The trace of a file."""
    return _named(path, lambda: Trace.from_json(_read(path)))


def read_measured(path: str) -> Trace:
    """The trace of a file, which must have costs."""
    trace = read_trace(path)
    if not trace.measured:
        raise RematError(
            f"{_name(path)} has no costs yet: `remat measure {path}` times its operations here, "
            "`remat measure --roofline h200` estimates them"
        )
    return trace


def read_plan(path: str) -> Plan:
    """The plan of a file."""
    return _named(path, lambda: Plan.from_json(_read(path)))


def read_plans(path: str) -> list[Plan]:
    """The plans of a file: those of a sweep, or the one of a solve."""

    def plans() -> list[Plan]:
        text = _read(path)
        header = parse_plain_json(text, "remat.plan or remat.sweep")
        if isinstance(header, dict) and header.get("format") == SweepDocument.FORMAT:
            return SweepDocument.from_json(text).read(Plan)
        return [Plan.from_json(text)]

    return _named(path, plans)


def check_one_stdin(*paths: str) -> None:
    """Stdin can be read only once."""
    if paths.count("-") > 1:
        raise UsageError("only one document can come from stdin (-); give the other one as a file")


def check_outputs(*paths: Path | None) -> None:
    """Raises `RematError` for an output that could not be written."""
    for path in paths:
        if path is None:
            continue
        if str(path) == "-":
            raise UsageError("-o takes a file; for stdout use --json")
        if path.is_dir():
            raise RematError(f"cannot write {path}: it is a directory; name a file in it")
        if _is_special(path):
            continue
        folder = _real(path).parent
        if not folder.is_dir():
            raise RematError(f"cannot write {path}: there is no directory {folder}; make it first")
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RematError(f"cannot write {path}: {error.strerror}") from None


def suffix_of(path: Path) -> str:
    """The ending that tells the kind, without `.gz`: ".svg"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def write(path: Path, content: str | bytes) -> None:
    """All or nothing, gzipped where the name ends in `.gz`; a device or a pipe is written to."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_special(path):
            path.write_bytes(data)
        else:
            write_atomically(_real(path), data)
    except OSError as error:
        raise RematError(f"cannot write {path}: {error.strerror}") from None


def show(text: str) -> None:
    """Text for people on stdout, without what would steer a terminal."""
    _print("\n".join(plain(line) for line in text.split("\n")))


def show_json(text: str) -> None:
    """One JSON document on stdout. Names in it may be hostile: what does not print is escaped."""
    _print(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text))


def _print(text: str) -> None:
    print(text, flush=True)


def _read(path: str) -> bytes:
    try:
        if path == "-":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("- reads a document from stdin, but nothing is piped into it")
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:  # once: it may be a pipe
                data = file.read(MAX_BYTES + 1)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as file:
                return file.read(MAX_BYTES + 1)  # no document is longer, zipped or not
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"cannot read {_name(path)}: {reason}") from None
    return data


def _named(path: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except DocumentError as error:
        text = str(error)
        where = "" if text.startswith("cannot read") else f"{_name(path)}: "
        raise DocumentError(f"{where}{text}") from None


def _name(path: str) -> str:
    return "stdin" if path == "-" else path


def _real(path: Path) -> Path:
    """Where a link leads: it is the file that is replaced, not the link."""
    return Path(os.path.realpath(path))


def _is_special(path: Path) -> bool:
    with suppress(OSError):
        return path.exists() and not path.is_file()
    return False
