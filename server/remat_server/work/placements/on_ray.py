"""Solves on a Ray cluster: an actor for each, which keeps the solving process on its node.

The process is the same as on one machine, with the same limits; the actor only carries what is
said. Where a node is lost, its actors are, and their jobs are queued again.
"""

from __future__ import annotations

import socket
import time
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from remat.errors import ServiceError
from remat_server.work.messages import MESSAGES, Answered, Task
from remat_server.work.placements.local import LocalRun
from remat_server.work.placements.interface import Gone, Lost, Run, Said

_CONNECT_S = 5.0
_LOOK_S = 0.1


class Solver:
    """The actor: one solving process on its node."""

    def __init__(self, task: str, request: bytes) -> None:
        self._run = LocalRun()
        self._run.send(Task.model_validate_json(task), request)

    def look(self) -> tuple[list[tuple[str, bytes]], int, str]:
        """What was said since the last look (with an answer's body), the memory held, and how the
        process ended if it did."""
        try:
            said = self._run.messages()
        except Lost as lost:
            return [], 0, str(lost)
        frames = [
            (each[0].model_dump_json(), each[1])
            if isinstance(each, tuple)
            else (each.model_dump_json(), b"")
            for each in said
        ]
        return frames, self._run.memory_bytes(), ""


class RayRun:
    """A solve on the cluster, as its worker sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._memory_bytes = 0
        self.looking: Any = actor.look.remote()

    def messages(self) -> list[Said]:
        """What the actor has told; asks it again."""
        if not ray.wait([self.looking], timeout=0)[0]:
            return []
        try:
            frames, self._memory_bytes, ended = ray.get(self.looking, timeout=0)
        except GetTimeoutError:
            return []
        except RayError as error:
            raise Gone(f"the node of the solve was lost ({type(error).__name__})") from None
        if ended:
            raise Lost(ended)
        self.looking = self._actor.look.remote()
        said: list[Said] = []
        for text, body in frames:
            message = MESSAGES.validate_json(text)
            said.append((message, body) if isinstance(message, Answered) else cast(Said, message))
        return said

    def memory_bytes(self) -> int:
        """As the actor said last."""
        return self._memory_bytes

    def kill(self) -> None:
        """Ends the actor's process, and with it the solve."""
        ray.kill(self._actor, no_restart=True)


class RayPlacement:
    """A cluster that is there already. `address` as Ray's own; empty: `RAY_ADDRESS`, or a local
    one."""

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
        self._solver: Any = remote(Solver)

    def start(self, task: Task, request: bytes) -> Run:
        """Begin on a node that has a free core, once there is one."""
        resources = {"num_gpus": 1} if task.device == "cuda" else {}
        actor = self._solver.options(**resources).remote(task.model_dump_json(), request)
        return RayRun(actor)

    def wait(self, runs: list[Run], timeout_s: float) -> None:
        """Return once one of the actors has answered a look, or after a moment."""
        time.sleep(min(timeout_s, _LOOK_S))

    def close(self) -> None:
        """Leave the cluster."""
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
