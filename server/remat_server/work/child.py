"""The process that solves one request and exits: `python -m remat_server.work.child FD PARENT`.

It loads the solver and reports that it is ready, so that a worker can have one process in reserve.
It exits with its worker, has a memory limit, and uses neither the store nor the network.
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

import highspy  # noqa: F401  # loaded before the request arrives

from remat.errors import BudgetWarning, SolverWarning
from remat_server.problems import make_problem, out_of_memory_problem
from remat_server.work.linux_process import data_bytes, die_with_parent
from remat_server.work.messages import AnswerMessage, FailureMessage, ReadyMessage, SolveTask
from remat_server.work.solving import solve_request

_NEARLY_FULL = 0.7
"""Fraction of the memory limit above which any error is attributed to the limit."""
_MEMORY_ERRORS = (MemoryError, SystemError)
"""CPython raises `SystemError` if it has no memory to create a `MemoryError`."""


def main() -> int:
    """Solve one task from the connection whose file descriptor is the first argument."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C, and ends this process
    warnings.simplefilter("always", SolverWarning)  # reported in the plan and in the log
    warnings.simplefilter("ignore", BudgetWarning)  # the client warns
    warnings.showwarning = _log_warning
    logging.getLogger("remat").addHandler(_JsonLogHandler())
    try:
        _solve_task(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # the worker has exited
        return 1
    return 0


def _solve_task(connection: Connection) -> None:
    gc.freeze()
    gc.set_threshold(100_000)  # documents are many small objects without cycles
    connection.send_bytes(ReadyMessage().model_dump_json().encode())
    task = SolveTask.model_validate_json(connection.recv_bytes())
    request = gzip.decompress(connection.recv_bytes())
    os.nice(task.niceness)
    if task.device != "cuda":  # CUDA reserves far more memory than it uses
        _limit_memory(task.memory_bytes)
    try:
        outcome = solve_request(
            task.kind,
            request,
            threads=task.threads,
            time_limit_s=task.time_limit_s,
            device=task.device,
            on_progress=lambda message: connection.send_bytes(message.model_dump_json().encode()),
        )
    except ConnectionError:
        raise
    except Exception as error:
        # Without memory, any call may raise any error. The traceback still references the objects
        # that used the memory.
        is_nearly_full = data_bytes("self") > _NEARLY_FULL * task.memory_bytes
        if isinstance(error, _MEMORY_ERRORS) or is_nearly_full:
            memory_problem = out_of_memory_problem(task.kind, task.memory_bytes)
            outcome = FailureMessage(status="failed", problem=memory_problem)
        else:
            _log_error(error)
            internal_problem = make_problem(500, _BUG_DETAIL, "internal")
            outcome = FailureMessage(status="failed", problem=internal_problem)
    if isinstance(outcome, FailureMessage):
        connection.send_bytes(outcome.model_dump_json().encode())
        return
    answer, body = outcome
    assert isinstance(answer, AnswerMessage)
    connection.send_bytes(answer.model_dump_json().encode())
    connection.send_bytes(body)


_BUG_DETAIL = "this is a bug in remat: the service's log has the traceback; please report it"


def _log_error(error: Exception) -> None:
    """Log an error as one JSON line, without its message, which may quote the request."""
    lines = traceback.format_tb(error.__traceback__)
    record = {"event": "a solve failed", "level": "error", "exception": type(error).__name__}
    print(json.dumps({**record, "traceback": "".join(lines)}), file=sys.stderr, flush=True)


class _JsonLogHandler(logging.Handler):
    """Prints the library's log records as JSON lines, like the service's log."""

    def emit(self, record: logging.LogRecord) -> None:
        line = {"event": record.getMessage(), "level": record.levelname.lower()}
        print(json.dumps(line), file=sys.stderr, flush=True)


def _log_warning(message: Warning | str, category: type[Warning], *location: object) -> None:
    record = {"event": "a solve warned", "level": "warning", "warning": category.__name__}
    print(json.dumps({**record, "reason": str(message)}), file=sys.stderr, flush=True)


def _limit_memory(size_bytes: int) -> None:
    """Limit the process's data, not its addresses: thread stacks and arenas reserve addresses that
    use no memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, size_bytes))


if __name__ == "__main__":
    sys.exit(main())
