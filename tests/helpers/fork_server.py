"""A process that has imported what `remat` needs, and forks for each command.

Importing torch takes seconds, which is most of the time of a small command.
`python -m tests.helpers.fork_server SOCKET MODULES` listens at a socket until its standard input is
closed. `python -S tests/helpers/fork_server.py SOCKET WORDS` runs `remat WORDS` in it, with the
directory, environment and pipes of the shell that calls it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CAPTURE = (
    "torch._decomp",
    "torch._dynamo",
    "torch.fx.experimental.proxy_tensor",
    "remat.frontend.capture.trace",
    "remat.view",
)
"""Modules that the first capture would import.

They are imported without a capture: where torch is built with CUDA, a capture starts autograd's
threads, which a fork does not copy, and captures in the forked process fail.
"""

MODELS = (*CAPTURE, "transformers.models.gpt2.modeling_gpt2", "remat.commands.models.sources")
"""Modules that commands on models would import."""


class ForkServer:
    """A process that listens for commands and forks for each."""

    def __init__(
        self, modules: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="remat-forking-")
        self.socket = str(Path(self._folder.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", self.socket, *modules],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the process has ended"

    @property
    def command(self) -> list[str]:
        """The words that stand for `remat` in a shell."""
        return [sys.executable, "-S", __file__, self.socket]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._folder.cleanup()


def ask(
    where: str, words: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
) -> int:
    """Run `remat` with these words in a forked process, with these standard files; return its
    exit code."""
    task = {"words": words, "environment": dict(environment), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(where)
        socket.send_fds(asking, [b"\n"], list(files))
        asking.sendall(json.dumps(task).encode() + b"\n")
        with asking.makefile("rb") as answer:
            return int(answer.readline())


def _serve(where: str) -> None:
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.bind(where)
        waiting.listen()
        print(flush=True)
        while waiting in select.select([waiting, sys.stdin], [], [])[0]:
            connection, _ = waiting.accept()
            if not os.fork():
                waiting.close()
                _answer(connection)
                os._exit(0)
            connection.close()
            with contextlib.suppress(ChildProcessError):  # it has ended already
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket) -> None:
    """Run one command in a further child process, so that several may run concurrently, as in a
    pipe."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rwb") as stream:
        task = json.loads(stream.readline())
        pid = os.fork()
        if not pid:
            _run(task, files)
        stream.write(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(task: dict[str, Any], files: Sequence[int]) -> None:
    """Run a command as if this process had been started for it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.chdir(task["directory"])
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.path[0] = task["directory"]
    sys.argv = ["remat", *task["words"]]
    main = importlib.import_module("remat.cli").main
    main()


if __name__ == "__main__":
    if sys.flags.no_site:
        sys.exit(ask(sys.argv[1], sys.argv[2:], os.environ, (0, 1, 2)))
    for name in ("remat.cli", *sys.argv[2:]):
        importlib.import_module(name)
    _serve(sys.argv[1])
