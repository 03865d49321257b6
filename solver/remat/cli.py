"""The command line `remat`.

The service adds its commands through the entry point group `remat.commands`, so that the library
does not depend on it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from io import TextIOWrapper
from types import FrameType
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("the command line needs typer and rich: pip install 'remat[cli]'")

import remat
from remat.commands.common.exits import (
    EXIT_FAILED,
    ImmediateExit,
    SignalExit,
    describe_signal,
    error_line,
    exit_code,
    print_message,
    signal_exit_code,
)
from remat.commands.doctor import doctor
from remat.commands.fit import fit
from remat.commands.plans import diff, explain, plot
from remat.commands.run import run
from remat.commands.solve import compare, solve, sweep
from remat.commands.trace import estimate, measure, trace
from remat.commands.why import why
from remat.milp.solvers.solver_processes import kill_child_processes
from remat.plan_options import COMMANDS

_COMMANDS = {
    trace: "remat trace hf:gpt2 --set n_layer=4 -o trace.json.gz",
    estimate: "remat estimate hf:llama --dtype bfloat16 --batch 1 --tokens 2048",
    fit: "remat fit hf:gpt2 --device h100 --dtype bfloat16 --batch 64 --tokens 1024",
    why: "remat why snapshot.pickle --html why.html",
    measure: "remat measure trace.json.gz --roofline h200 -o costs.json.gz",
    solve: "remat solve costs.json.gz --budget 60% -o plan.json.gz",
    sweep: "remat sweep costs.json.gz --time-limit 10 -o frontier.html",
    compare: "remat compare costs.json.gz --budget 60% --strategies auto,per_block,rotor",
    explain: "remat explain plan.json.gz transformer.h.3.mlp",
    diff: "remat diff plan.json.gz other.json.gz",
    plot: "remat plot plan.json.gz -o plan.html",
    run: "remat run train.py:step --budget 60%",
    doctor: "remat doctor",
}
"""The commands by function, each with the example in its help text."""


_NO_ARGUMENTS = "NoArgsIsHelpError"
"""Typer's error for a command group without arguments; its text is the help page."""

_VERY_SIMILAR = 0.75
"""The minimum similarity (`difflib`) of an unknown command to the one that is suggested."""

_UNKNOWN_OPTION = re.compile(r"No such option: --(?P<option>[\w-]+).*`(?P<command>.*) --help`")
_UNKNOWN_COMMAND = re.compile(r"No such command '([^']*)'")


@dataclass
class CliState:
    """Options that precede the command."""

    debug: bool = False


class _StderrLog(logging.Handler):
    """Prints the library's warnings as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print_message(record.getMessage())


app = typer.Typer(
    name="remat",
    help="Optimal rematerialization for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command, _example in _COMMANDS.items():
    app.command(epilog=f"Example: {_example}")(_command)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(remat.__version__)
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Optimal rematerialization for PyTorch."""
    context.obj.debug = debug
    if (
        context.invoked_subcommand in _command_names()
    ):  # the commands of other packages handle signals themselves
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(signum, _raise_signal_exit)
        logging.getLogger("remat").addHandler(_StderrLog())


def main() -> None:
    """Run the command line. An error is one line that says what to do: see
    `commands.common.exits`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without these characters
    state = CliState()
    load_error = _add_entry_point_commands(sys.argv[1:])
    try:
        code = app(obj=state, prog_name="remat", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it
        code = EXIT_FAILED
    except ImmediateExit as immediate_exit:
        kill_child_processes()
        os._exit(signal_exit_code(immediate_exit.signum))
    except SignalExit as signal_exit:
        print_message(describe_signal(signal_exit.signum))
        code = signal_exit_code(signal_exit.signum)
    except Exception as error:
        if state.debug:
            traceback.print_exc()
        if type(error).__name__ == _NO_ARGUMENTS:
            print(error)
        elif line := _error_line_with_hint(error_line(error), load_error):
            print_message(line)
        code = exit_code(error)
    _flush_stdout()
    sys.exit(code if isinstance(code, int) else 0)


def _error_line_with_hint(line: str, load_error: str) -> str:
    """Return the line of an error. For an option of a plan that the command does not take, say why
    it does not. For an unknown command, add a similar command, or the reason why the commands of
    another package are missing."""
    if (option := _UNKNOWN_OPTION.match(line)) and (door := COMMANDS.get(option["command"])):
        name = option["option"].replace("-", "_")
        if name in door.missing:
            return f"{door.reason_without(name)}. See `{door.name} --help`."
    unknown = _UNKNOWN_COMMAND.search(line)
    if unknown is None:
        return line
    if similar := get_close_matches(unknown[1], _command_names(), cutoff=_VERY_SIMILAR):
        hint = f"; did you mean {similar[0]!r}?"
        return line if "Did you mean" in line else line.replace(". See", f"{hint} See", 1)
    return f"{line} ({load_error})" if load_error else line


def _command_names() -> list[str]:
    return [command.__name__ for command in _COMMANDS]


def _add_entry_point_commands(arguments: Sequence[str]) -> str:
    """Load the commands of other packages, unless the command is one of remat's, as loading takes a
    while. Return the error if one cannot be loaded, else ""."""
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command in _command_names():
        return ""
    for point in entry_points(group="remat.commands"):
        try:
            point.load()(app)
        except ImportError as error:
            return f"the commands of {point.name} cannot be loaded: {error_line(error)}"
    return ""


def _raise_signal_exit(signum: int, frame: FrameType | None) -> None:
    """Raise an exception that ends the command, so that its files are cleaned up."""
    raise SignalExit(signum)


def _flush_stdout() -> None:
    """Flush stdout, so that Python does not print an error about a closed pipe at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
