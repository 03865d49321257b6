"""Reads documents from files or stdin (`-`), gzipped or not; writes and prints results.

Output paths are checked before a command starts, because a solve may take an hour.
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
from remat.documents.base import MAX_BYTES, parse_strict_json, write_atomically
from remat.documents.plan import SweepDocument
from remat.documents.trace import Trace
from remat.errors import DocumentError, RematError, similar_names_hint
from remat.plan import Plan
from remat.view.text import plain_text

_T = TypeVar("_T")

_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]")


def read_trace(path: str) -> Trace:
    """Read a trace from a file or stdin. Raises `DocumentError`."""
    return _errors_name_source(path, lambda: Trace.from_json(_read_document_bytes(path)))


def read_measured_trace(path: str) -> Trace:
    """Read a trace that has costs. Raises `RematError` if it has none."""
    trace = read_trace(path)
    if not trace.measured:
        raise RematError(
            f"{_source_name(path)} has no costs yet: `remat measure {path}` times its operations "
            "here, `remat measure --roofline h200` estimates them"
        )
    return trace


def read_plan(path: str) -> Plan:
    """Read a plan from a file or stdin. Raises `DocumentError`."""
    return _errors_name_source(path, lambda: Plan.from_json(_read_document_bytes(path)))


def read_plans(path: str) -> list[Plan]:
    """Read the plans of a sweep, or the only plan of a solve. Raises `DocumentError`."""

    def plans() -> list[Plan]:
        text = _read_document_bytes(path)
        header = parse_strict_json(text, "remat.plan or remat.sweep")
        if isinstance(header, dict) and header.get("format") == SweepDocument.FORMAT:
            return SweepDocument.from_json(text).to_plans(Plan)
        return [Plan.from_json(text)]

    return _errors_name_source(path, plans)


def check_one_stdin(*paths: str) -> None:
    """Raise `UsageError` if two paths are stdin, which can be read only once."""
    if paths.count("-") > 1:
        raise UsageError("only one document can come from stdin (-); give the other one as a file")


def check_outputs(*paths: Path | None) -> None:
    """Raise `RematError` for an output file that cannot be written; None is skipped."""
    for path in paths:
        if path is None:
            continue
        if str(path) == "-":
            raise UsageError("-o takes a file; use --json to print on stdout")
        if path.is_dir():
            raise RematError(f"cannot write {path}: it is a directory; name a file in it")
        if _is_device_or_pipe(path):
            continue
        folder = _resolve_link(path).parent
        if not folder.is_dir():
            raise RematError(
                f"cannot write {path}: there is no directory {folder}; create it first"
            )
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RematError(f"cannot write {path}: {error.strerror}") from None


def suffix_without_gz(path: Path) -> str:
    """Return the last file name ending in lower case, such as ".svg", without `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file atomically, gzipped if its name ends in `.gz`; a device or pipe directly."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_device_or_pipe(path):
            path.write_bytes(data)
        else:
            write_atomically(_resolve_link(path), data)
    except OSError as error:
        raise RematError(f"cannot write {path}: {error.strerror}") from None


def print_text(text: str) -> None:
    """Print text on stdout, without control characters."""
    _print_to_stdout("\n".join(plain_text(line) for line in text.split("\n")))


def print_json(text: str) -> None:
    """Print a JSON document on stdout. Names in it may be hostile, so unprintable characters are
    escaped."""
    _print_to_stdout(_UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text))


def _print_to_stdout(text: str) -> None:
    """Print text on stdout at once."""
    print(text, flush=True)


def _read_document_bytes(path: str) -> bytes:
    """Return the content of a file or of stdin (`-`), unzipped. Raises `DocumentError` if it cannot
    be read, and `UsageError` if nothing is piped into stdin."""
    try:
        if path == "-":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("- reads a document from stdin, but nothing is piped into it")
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:  # read once: it may be a pipe
                data = file.read(MAX_BYTES + 1)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as file:
                return file.read(MAX_BYTES + 1)  # the largest size of a document, zipped or not
    except FileNotFoundError:
        raise DocumentError(
            f"cannot read {path}: No such file{_similar_files_hint(path)}; check "
            "the path. `remat trace`, `remat measure` and `remat solve` write such files with -o"
        ) from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"cannot read {_source_name(path)}: {reason}") from None
    return data


def _similar_files_hint(path: str) -> str:
    """Return the files next to a missing one whose names are similar; "" if there are none."""
    folder = Path(path).parent
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return similar_names_hint(Path(path).name, names, lead="; near is ")


def _errors_name_source(path: str, read: Callable[[], _T]) -> _T:
    """Return the result of `read`; a `DocumentError` that it raises gets the name of the file, or
    stdin."""
    try:
        return read()
    except DocumentError as error:
        text = str(error)
        prefix = "" if text.startswith("cannot read") else f"{_source_name(path)}: "
        raise DocumentError(f"{prefix}{text}") from None


def _source_name(path: str) -> str:
    """Return the path, or "stdin" for `-`."""
    return "stdin" if path == "-" else path


def _resolve_link(path: Path) -> Path:
    """Return the target of a symbolic link, so that writing replaces the target, not the link."""
    return Path(os.path.realpath(path))


def _is_device_or_pipe(path: Path) -> bool:
    """True for a path that exists and is no regular file."""
    with suppress(OSError):
        return path.exists() and not path.is_file()
    return False
