"""`remat` as a child process, on documents of a real model."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.helpers.fork_server import MODELS, ForkServer, ask
from tests.helpers.process_limit import PROCESS_LIMIT_S
from tests.helpers.training.models import gpt2

import remat
from remat.documents.plan import SweepDocument
from remat.documents.trace import Trace
from remat.plan import Plan
from remat.strategies import Rotor


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """The JSON that a successful command printed."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on stderr of a failed command, which prints nothing on stdout."""
        assert self.out == ""
        assert self.err.startswith("remat: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err


@cache
def _forking(*modules: str) -> ForkServer:
    server = ForkServer(modules)
    atexit.register(server.close)
    return server


def quick(
    *arguments: object,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    models: bool = False,
) -> Ended:
    """Run a command as `run` does, in a process that is already started.

    Starting takes a second, and several for commands on models.
    """
    where = _forking(*MODELS if models else ()).socket
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = [Path(folder) / name for name in ("in", "out", "err")]
        for path, data in zip(paths, (stdin, b"", b""), strict=True):
            path.write_bytes(data)
        files = [stack.enter_context(path.open("r+b")).fileno() for path in paths]
        code = ask(where, [*map(str, arguments)], {**os.environ, **(env or {})}, files)
        return Ended(code, paths[1].read_text(), paths[2].read_text())


def command(*arguments: object) -> list[str]:
    """Return the command line that starts `remat` with these arguments."""
    return [sys.executable, "-m", "remat.cli", *map(str, arguments)]


def run(
    *arguments: object, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> Ended:
    """Run `remat` to its end."""
    completed = subprocess.run(
        command(*arguments),
        input=b"" if stdin is None else stdin,
        capture_output=True,
        env={**os.environ, **(env or {})},
        timeout=PROCESS_LIMIT_S,
    )
    return Ended(completed.returncode, completed.stdout.decode(), completed.stderr.decode())


@contextmanager
def interrupts_enabled() -> Iterator[None]:
    """Make child processes that start in this block react to SIGINT, even where the tests run as
    a background job that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@cache
def trace() -> Trace:
    """Return a trace of some hundred operations of a GPT-2, without costs."""
    torch.manual_seed(0)
    case = gpt2()
    return remat.trace(case.model, case.args, case.kwargs)


@dataclass(frozen=True)
class Documents:
    """Files with the documents of one model."""

    bare: Path
    """A trace without costs."""
    trace: Path
    plan: Path
    other: Path
    sweep: Path


def write_documents(folder: Path) -> Documents:
    """Compute and save the documents."""
    bare = trace()
    priced = remat.measure(bare, remat.Roofline("cpu"))
    actual = Documents(*(folder / f"{name}.json.gz" for name in ("bare", "trace", "plan", "other")),
                      folder / "sweep.json")  # fmt: skip
    plans: list[Plan] = [remat.solve(priced, budget, Rotor()) for budget in ("70%", "90%")]
    bare.save(actual.bare)
    priced.save(actual.trace)
    plans[0].save(actual.plan)
    plans[1].save(actual.other)
    SweepDocument.of(plans).save(actual.sweep)
    return actual
