"""The worker as a process, standalone or supervised by the service:
`python -m remat_server.work.processes`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog

from remat.errors import ServiceError
from remat_server import logs
from remat_server.settings import Settings
from remat_server.store.database import Database
from remat_server.work import devices
from remat_server.work.linux_process import die_with_parent
from remat_server.work.placements.interface import Placement
from remat_server.work.placements.local import LocalPlacement
from remat_server.work.worker import Worker

log = structlog.get_logger()

_PARENT_VARIABLE = "REMAT_WORKER_OF"
"""Environment variable with the process id of the supervising service."""
_RESTART_S = 1.0


def run_worker(settings: Settings) -> None:
    """Solve jobs from the store until SIGTERM or SIGINT."""
    logs.configure(settings)
    database = Database(settings.store_url)
    database.migrate()
    placement = _placement(settings)
    worker = Worker(settings, database, placement, devices.measurable_devices())
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, worker.stop)
    worker.run()
    database.close()


def _placement(settings: Settings) -> Placement:
    if settings.placement == "local":
        return LocalPlacement()
    try:
        from remat_server.work.placements.on_ray import RayPlacement
    except ImportError as error:
        raise ServiceError(f"Ray is not installed ({error}): pip install 'remat[ray]'") from None
    return RayPlacement(settings.ray_address)


class SupervisedWorker:
    """The service's worker process: started with the service, restarted if it exits, drained at the
    end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the worker process, and restart it whenever it exits."""
        self._process = await self._spawn()
        self._task = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Stop the worker once its running solves end; kill it after `drain_s` and 10 s more."""
        if self._task is not None:
            self._task.cancel()
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), self._settings.drain_s + 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            **self._settings.environment(),
            _PARENT_VARIABLE: str(os.getpid()),
        }
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "remat_server.work.processes",
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _supervise(self) -> None:
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.error("the worker exited and is restarted", code=code)
            self._process = await self._respawn()

    async def _respawn(self) -> asyncio.subprocess.Process:
        while True:
            await asyncio.sleep(_RESTART_S)
            try:
                return await self._spawn()
            except OSError as error:  # temporarily out of memory or processes
                log.error("the worker cannot be started; retrying", error=str(error))


def main() -> int:
    """Run the worker of a service, with settings from the environment."""
    parent = os.environ.pop(_PARENT_VARIABLE, "")
    if parent:
        die_with_parent(int(parent))
    try:
        run_worker(Settings())
    except ServiceError as error:
        log.error("the worker cannot start", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
