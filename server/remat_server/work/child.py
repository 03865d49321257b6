"""The process that solves one request and ends: `python -m remat_server.work.child FD PARENT`.

It loads the solver first and says that it is ready, so that a worker can keep one waiting. It dies
with its worker, holds no more memory than it may, and does nothing else: no store, no network.
"""

from __future__ import annotations

import gc
import gzip
import json
import logging
import os
import resource
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import highspy  # noqa: F401  # loaded before the request comes

from remat.errors import SolverWarning
from remat_server.problems import out_of_memory, problem
from remat_server.work.linux_process import data_bytes, die_with_parent
from remat_server.work.messages import Answered, Failed, Ready, Task
from remat_server.work.solving import perform

_NEARLY = 0.7
_WITHOUT_MEMORY = (MemoryError, SystemError)
"""The second is what CPython raises where it could not even make the first."""


def main() -> int:
    """Serve one task on the connection whose file descriptor is the argument."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends us
    warnings.simplefilter("always", SolverWarning)  # the plan says so, and so does the log
    warnings.showwarning = _log_warning
    logging.getLogger("remat").addHandler(_Lines())
    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # the worker is gone
        return 1
    return 0


def _serve(connection: Connection) -> None:
    gc.freeze()
    gc.set_threshold(100_000)  # documents are many small objects without cycles
    connection.send_bytes(Ready().model_dump_json().encode())
    task = Task.model_validate_json(connection.recv_bytes())
    request = gzip.decompress(connection.recv_bytes())
    os.nice(task.niceness)
    if task.device != "cuda":  # which reserves far more than it uses
        _limit_memory(task.memory_bytes)
    try:
        found = perform(
            task.kind,
            request,
            threads=task.threads,
            device=task.device,
            tell=lambda message: connection.send_bytes(message.model_dump_json().encode()),
        )
    except ConnectionError:
        raise
    except Exception as error:
        # Without memory, any call may fail in any way; while the error is looked at, its traceback
        # still holds what was there.
        if isinstance(error, _WITHOUT_MEMORY) or data_bytes("self") > _NEARLY * task.memory_bytes:
            found = Failed(status="failed", problem=out_of_memory(task.memory_bytes))
        else:
            _log(error)
            found = Failed(status="failed", problem=problem(500, A_BUG, "internal"))
    if isinstance(found, Failed):
        connection.send_bytes(found.model_dump_json().encode())
        return
    answered, body = found
    assert isinstance(answered, Answered)
    connection.send_bytes(answered.model_dump_json().encode())
    connection.send_bytes(body)


A_BUG = "this is a bug of remat: the service's log has its traceback; please report it"


def _log(error: Exception) -> None:
    """One line, as the service's log is, and without what was posted."""
    lines = traceback.format_tb(error.__traceback__)
    told = {"event": "solve met a bug", "level": "error", "exception": type(error).__name__}
    print(json.dumps({**told, "traceback": "".join(lines)}), file=sys.stderr, flush=True)


class _Lines(logging.Handler):
    """What the library logs, as lines of the service's log."""

    def emit(self, record: logging.LogRecord) -> None:
        told = {"event": record.getMessage(), "level": record.levelname.lower()}
        print(json.dumps(told), file=sys.stderr, flush=True)


def _log_warning(message: Warning | str, category: type[Warning], *where: object) -> None:
    told = {"event": "a solve met a warning", "level": "warning", "warning": category.__name__}
    print(json.dumps({**told, "reason": str(message)}), file=sys.stderr, flush=True)


def _limit_memory(size_bytes: int) -> None:
    """Of data, not of addresses: reserved addresses of thread stacks and arenas cost nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, size_bytes))


if __name__ == "__main__":
    sys.exit(main())
