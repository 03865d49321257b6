"""Exit codes of the commands, and errors as one line on stderr.

0 success, 1 failure, 2 usage (also a malformed budget), 3 infeasible budget, 4 time limit without a
plan, 128 + n ended by signal n (130 is Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import suppress
from importlib import metadata

from remat.errors import BudgetError, InfeasibleBudget, RematError, SolverTimeout
from remat.view.text import plain_text

EXIT_FAILED, EXIT_USAGE, EXIT_INFEASIBLE, EXIT_TIMEOUT = 1, 2, 3, 4

_EXTRA_REQUIREMENT = re.compile(r"""(?P<name>[\w-]+).*\bextra\s*==\s*["'](?P<extra>[\w-]+)""")
"""A line of remat's metadata that requires a package for an extra."""


class UsageError(RematError):
    """Wrong arguments, or arguments that cannot be combined."""


class InterruptedWithoutResult(RematError):
    """A signal ended the command before it had a result."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class SignalExit(BaseException):
    """A signal outside of interruptible work. Not an `Exception`, so that code which continues
    after any error does not continue after this."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class ImmediateExit(SignalExit):
    """A second signal: exit immediately, even if work is still running."""


def describe_signal(signum: int) -> str:
    """Return "interrupted" for Ctrl-C, "terminated" for any other signal."""
    return "interrupted" if signum == signal.SIGINT else "terminated"


def signal_exit_code(signum: int) -> int:
    """Return the exit code that shells use for a process that a signal ended."""
    return 128 + signum


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that raised this exception."""
    match error:
        case InterruptedWithoutResult(signum=signum):
            return signal_exit_code(signum)
        case UsageError() | BudgetError():
            return EXIT_USAGE
        case InfeasibleBudget():
            return EXIT_INFEASIBLE
        case SolverTimeout():
            return EXIT_TIMEOUT
    code = getattr(error, "exit_code", EXIT_FAILED)  # typer's errors have it
    return code if isinstance(code, int) else EXIT_FAILED


def error_line(error: BaseException) -> str:
    """Return an exception's message on one line: what is wrong, and what to do."""
    if isinstance(error, RematError):
        return " ".join(plain_text(str(error)).split())
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_package_line(error.name)
    if isinstance(error, MemoryError):
        return "out of memory: free some, or solve a smaller problem (fewer slots, smaller model)"
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return plain_text(f"{file}{error.strerror or error}")
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # an error of typer
        command = getattr(getattr(error, "ctx", None), "command_path", "remat")
        text = " ".join(plain_text(str(format_message())).split())
        return f"{text} See `{command} --help`." if text else ""
    description = " ".join(plain_text(f"{type(error).__name__}: {error}").split())[:300]
    return f"a bug in remat, {description}: see `remat --debug COMMAND`, and please report it"


def print_message(message: str) -> None:
    """Print one line on stderr, after the prefix "remat: "."""
    print(f"remat: {plain_text(message)}", file=sys.stderr, flush=True)


def _missing_package_line(module: str) -> str:
    """Return the message for a module that cannot be imported, with the extra of remat that
    installs it if there is one."""
    package = module.partition(".")[0]
    with suppress(metadata.PackageNotFoundError):  # a source tree that is not installed
        for match in filter(None, map(_EXTRA_REQUIREMENT.match, metadata.requires("remat") or ())):
            if match["name"].replace("-", "_") == package:
                return f"this needs the package {package!r}: pip install 'remat[{match['extra']}]'"
    return f"this needs the package {plain_text(package)!r}, which is not installed: pip install it"
