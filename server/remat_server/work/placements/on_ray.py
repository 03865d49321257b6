"""Solving processes on a Ray cluster, each started by an actor on its node.

The process is the same as on one machine, with the same limits; the actor only forwards messages.
If a node is lost, its actors are lost too, and their jobs are queued again.
"""

from __future__ import annotations

import socket
import time
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from remat.errors import ServiceError
from remat_server.work.messages import MESSAGES, AnswerMessage, SolveTask
from remat_server.work.placements.interface import NodeLost, RunningSolve, SolveLost, SolveMessage
from remat_server.work.placements.local import LocalSolve

_CONNECT_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.1


class SolveActor:
    """Ray actor with one solving process on its node."""

    def __init__(self, task: str, request: bytes) -> None:
        self._solve = LocalSolve()
        self._solve.send(SolveTask.model_validate_json(task), request)

    def poll(self) -> tuple[list[tuple[str, bytes]], int, str]:
        """Return the messages since the last call (with an answer's body), the memory in use, and a
        description of the process's end, "" if it is running."""
        try:
            messages = self._solve.messages()
        except SolveLost as lost:
            return [], 0, str(lost)
        frames = [
            (message[0].model_dump_json(), message[1])
            if isinstance(message, tuple)
            else (message.model_dump_json(), b"")
            for message in messages
        ]
        return frames, self._solve.memory_bytes(), ""


class RaySolve:
    """A solve on the cluster, seen from its worker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._memory_bytes = 0
        self.pending_poll: Any = actor.poll.remote()

    def messages(self) -> list[SolveMessage]:
        """Return the messages of the actor's last poll, and start the next poll."""
        if not ray.wait([self.pending_poll], timeout=0)[0]:
            return []
        try:
            frames, self._memory_bytes, ended = ray.get(self.pending_poll, timeout=0)
        except GetTimeoutError:
            return []
        except RayError as error:
            raise NodeLost(f"the node of the solve was lost ({type(error).__name__})") from None
        if ended:
            raise SolveLost(ended)
        self.pending_poll = self._actor.poll.remote()
        messages: list[SolveMessage] = []
        for text, body in frames:
            message = MESSAGES.validate_json(text)
            is_answer = isinstance(message, AnswerMessage)
            messages.append((message, body) if is_answer else cast(SolveMessage, message))
        return messages

    def memory_bytes(self) -> int:
        """Return the memory in use at the actor's last poll."""
        return self._memory_bytes

    def kill(self) -> None:
        """Kill the actor's process, and with it the solving process."""
        ray.kill(self._actor, no_restart=True)


class RayPlacement:
    """An existing Ray cluster. `address` has the form of `ray.init`; "" means `RAY_ADDRESS`, or a
    local cluster."""

    def __init__(self, address: str, cpus_per_solve: float = 1.0) -> None:
        try:
            _check_reachable(address)
            ray.init(
                address=address or None,
                namespace="remat",
                log_to_driver=False,
                configure_logging=False,
            )
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise ServiceError(
                f"the Ray cluster at {address or 'RAY_ADDRESS'} cannot be joined: {error}"
            ) from None
        remote = ray.remote(num_cpus=cpus_per_solve, max_restarts=0, max_task_retries=0)
        self._solver: Any = remote(SolveActor)

    def start(self, task: SolveTask, request: bytes) -> RunningSolve:
        """Start on a node with a free core, once there is one."""
        resources = {"num_gpus": 1} if task.device == "cuda" else {}
        actor = self._solver.options(**resources).remote(task.model_dump_json(), request)
        return RaySolve(actor)

    def wait(self, runs: list[RunningSolve], timeout_s: float) -> None:
        """Wait for the timeout, at most 0.1 s."""
        time.sleep(min(timeout_s, _POLL_INTERVAL_S))

    def close(self) -> None:
        """Disconnect from the cluster."""
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise OSError if the cluster's address is unreachable; `ray.init` would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
