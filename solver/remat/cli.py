"""`remat` on the command line. The service adds its commands by the entry point `remat.commands`,
so that the library need not know it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
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
    FAILED,
    Leave,
    Stopped,
    code_of,
    code_of_signal,
    line_of,
    say,
    word,
)
from remat.commands.compare import compare
from remat.commands.diff import diff
from remat.commands.doctor import doctor
from remat.commands.estimate import estimate
from remat.commands.explain import explain
from remat.commands.measure import measure
from remat.commands.plot import plot
from remat.commands.run import run
from remat.commands.solve import solve
from remat.commands.sweep import sweep
from remat.commands.trace import trace
from remat.milp.solvers.solver_processes import kill_child_processes

_COMMANDS = {
    trace: "remat trace hf:gpt2 --set n_layer=4 -o trace.json.gz",
    estimate: "remat estimate hf:llama --dtype bfloat16 --batch 1 --tokens 2048",
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
"""Each with an example."""


@dataclass
class Settings:
    """What stands before the command."""

    debug: bool = False


class _Log(logging.Handler):
    """Warnings of the library as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


app = typer.Typer(
    name="remat",
    help="Optimal rematerialization for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _command, _example in _COMMANDS.items():
    app.command(epilog=f"Example: {_example}")(_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(remat.__version__)
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Optimal rematerialization for PyTorch."""
    context.obj.debug = debug
    if context.invoked_subcommand in _names():  # those of others have their own way to end
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, _stop)
        logging.getLogger("remat").addHandler(_Log())


def main() -> None:
    """Run the command line. An error is one line that says what to do: `commands.common.exits`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has not our letters
    settings = Settings()
    missing = _add_commands_of_others(sys.argv[1:])
    try:
        code = app(obj=settings, prog_name="remat", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has enough
        code = FAILED
    except Leave as leave:
        kill_child_processes()
        os._exit(code_of_signal(leave.signum))
    except Stopped as stopped:
        say(word(stopped.signum))
        code = code_of_signal(stopped.signum)
    except Exception as error:
        if settings.debug:
            traceback.print_exc()
        line = line_of(error)
        if missing and "No such command" in line:
            line += f" ({missing})"
        if line:  # typer shows the help where there was no command at all
            say(line)
        code = code_of(error)
    _close_stdout()
    sys.exit(code if isinstance(code, int) else 0)


def _names() -> list[str]:
    return [command.__name__ for command in _COMMANDS]


def _add_commands_of_others(arguments: Sequence[str]) -> str:
    """Where the command is none of ours, as loading them takes a while. Returns why some cannot be
    loaded."""
    first = next((word for word in arguments if not word.startswith("-")), None)
    if first in _names():
        return ""
    for point in entry_points(group="remat.commands"):
        try:
            point.load()(app)
        except ImportError as error:
            return f"the commands of {point.name} cannot be loaded: {line_of(error)}"
    return ""


def _stop(signum: int, frame: FrameType | None) -> None:
    """What was begun is put away on the way out."""
    raise Stopped(signum)


def _close_stdout() -> None:
    """So that Python does not complain at its end about a pipe that is closed."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
