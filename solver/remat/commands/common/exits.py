"""How a command ends: exit codes, and errors as one line on stderr.

0 done, 1 failed, 2 usage (also a budget that cannot be read), 3 infeasible, 4 time limit without a
plan, 128 + n ended by signal n (130 is Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import suppress
from importlib import metadata

from remat.errors import BudgetError, InfeasibleBudget, RematError, SolverTimeout
from remat.view.drawing.text import plain

FAILED, USAGE, INFEASIBLE, TIMEOUT = 1, 2, 3, 4

_OF_EXTRA = re.compile(r"""(?P<name>[\w-]+).*\bextra\s*==\s*["'](?P<extra>[\w-]+)""")
"""A line of the package's own metadata that tells what an extra installs."""


class UsageError(RematError):
    """Arguments that cannot be, or not together."""


class Interrupted(RematError):
    """A signal ended the command before it had anything to show."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class Stopped(BaseException):
    """A signal, where there is nothing to show. Not an `Exception`, so that whoever goes on after
    any error does not after this."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Leave(Stopped):
    """A second signal: leave at once, whatever still runs."""


def word(signum: int) -> str:
    """What a signal did to us."""
    return "interrupted" if signum == signal.SIGINT else "terminated"


def code_of_signal(signum: int) -> int:
    """As shells say it."""
    return 128 + signum


def code_of(error: BaseException) -> int:
    """The exit code for an exception."""
    match error:
        case Interrupted(signum=signum):
            return code_of_signal(signum)
        case UsageError() | BudgetError():
            return USAGE
        case InfeasibleBudget():
            return INFEASIBLE
        case SolverTimeout():
            return TIMEOUT
    code = getattr(error, "exit_code", FAILED)  # typer's own
    return code if isinstance(code, int) else FAILED


def line_of(error: BaseException) -> str:
    """What is wrong and what to do, on one line."""
    if isinstance(error, RematError):
        return " ".join(plain(str(error)).split())
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing(error.name)
    if isinstance(error, MemoryError):
        return "out of memory: free some, or ask for less (fewer slots, a smaller model)"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return plain(f"{where}{error.strerror or error}")
    if (tell := getattr(error, "format_message", None)) is not None:  # typer's own
        command = getattr(getattr(error, "ctx", None), "command_path", "remat")
        text = " ".join(plain(str(tell())).split())
        return f"{text} See `{command} --help`." if text else ""
    what = " ".join(plain(f"{type(error).__name__}: {error}").split())[:300]
    return f"a bug of remat, {what}: see `remat --debug COMMAND`, and please report it"


def say(message: str) -> None:
    """One line for people on stderr."""
    print(f"remat: {plain(message)}", file=sys.stderr, flush=True)


def _missing(module: str) -> str:
    top = module.partition(".")[0]
    with suppress(metadata.PackageNotFoundError):  # a source tree that is not installed
        for found in filter(None, map(_OF_EXTRA.match, metadata.requires("remat") or ())):
            if found["name"].replace("-", "_") == top:
                return f"this needs the package {top!r}: pip install 'remat[{found['extra']}]'"
    return f"this needs the package {plain(top)!r}, which is not installed: pip install it"
