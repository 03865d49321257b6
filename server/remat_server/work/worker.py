"""The worker: claims jobs from the store, solves each in a process, and stores the answers.

The complete state is in the store, so a worker may disappear at any time: its leases expire, and
another worker claims its jobs. The worker's loop reads the messages of the processes, renews
leases, drops cancelled jobs, and enforces the limits of memory and time of each solve.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError

from remat.service.wire import ProblemDetails
from remat_server.problems import make_problem, out_of_memory_problem
from remat_server.settings import Settings
from remat_server.store import leases, upkeep
from remat_server.store.database import Database
from remat_server.store.leases import ClaimedJob
from remat_server.work.messages import AnswerMessage, FailureMessage, ProgressMessage, SolveTask
from remat_server.work.placements.interface import NodeLost, Placement, RunningSolve, SolveLost

log = structlog.get_logger()

_WAIT_S = 0.05
_POLL_INTERVAL_S = 0.25
_UPKEEP_INTERVAL_S = 10.0
_GRACE_S = 60.0
"""Time beyond its time limit in which a solve may measure, and write its answer."""
_RETRY_INTERVAL_S = 1.0

_FULL_BYTES, _FULL_TIMEOUT_S = 2 << 20, 10.0
"""A solve with fewer free bytes than this, for longer than this, is ended: it does not end itself,
since CPython 3.11 loops forever if it has no memory for an exception."""


@dataclass
class ActiveJob:
    """A job that this worker is solving."""

    job: ClaimedJob
    run: RunningSolve
    started_at_s: float = field(default_factory=time.monotonic)
    process_peak_bytes: int = 0
    """The most memory of its process so far, as far as it was measured."""
    full_since_s: float | None = None
    """Time since which the memory of its process is full."""
    outcome: FailureMessage | tuple[AnswerMessage, bytes] | None = None
    """The result, until it is in the store."""


class Worker:
    """Solves jobs until it is stopped. `devices` are the device types on which it can measure."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        placement: Placement,
        devices: Sequence[str] = (),
    ) -> None:
        self.name = f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(3)}"
        self._settings = settings
        self._database = database
        self._placement = placement
        self._devices = tuple(devices)
        self._active: dict[str, ActiveJob] = {}
        self._stop_at: float | None = None
        self._due_at_s: dict[str, float] = {}

    def stop(self, signum: int = 0, frame: object = None) -> None:
        """Claim no more jobs, and exit once the running ones have ended, or after `drain_s`."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._settings.drain_s

    def run(self) -> None:
        """Solve jobs until `stop`. Solves continue while the store does not respond."""
        log.info("worker started", worker=self.name, slots=self._settings.concurrent_solves)
        while not self._is_done():
            runs = [a.run for a in self._active.values() if a.outcome is None]
            self._placement.wait(runs, _WAIT_S)
            try:
                self._step()
            except DBAPIError as error:
                log.error("the store does not respond", error=str(error.orig)[:300])
                time.sleep(_RETRY_INTERVAL_S)
        self._shut_down()

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._active or time.monotonic() > self._stop_at

    def _step(self) -> None:
        for active in list(self._active.values()):
            self._read_messages(active)
        if self._is_due("poll", _POLL_INTERVAL_S):
            self._drop_lost_jobs()
            for active in list(self._active.values()):
                self._enforce_limits(active)
        if self._is_due("lease", self._settings.lease_s / 3):
            self._renew_leases()
        if self._is_due("upkeep", _UPKEEP_INTERVAL_S):
            self._run_upkeep()
        while self._stop_at is None and len(self._active) < self._settings.concurrent_solves:
            if not self._claim():
                return

    def _is_due(self, task: str, interval_s: float) -> bool:
        """True if the task was not run within the interval; then the next interval starts."""
        if time.monotonic() < self._due_at_s.get(task, 0.0):
            return False
        self._due_at_s[task] = time.monotonic() + interval_s
        return True

    # -- jobs -------------------------------------------------------------------------------

    def _claim(self) -> bool:
        with self._database.read() as connection:
            if not leases.has_claimable_job(connection, self._devices):
                return False
        with self._database.write() as connection:
            job = leases.claim(connection, self.name, self._devices, self._settings.lease_s)
        if job is None:
            return False
        if job.id in self._active:  # its lease expired, but it is still being solved here
            return True
        task = SolveTask(
            kind=job.kind,
            memory_bytes=self._settings.solve_memory_bytes,
            niceness=self._settings.niceness,
            threads=self._settings.threads_per_solve,
            time_limit_s=self._settings.solve_limit_s,
            device=job.needs,
        )
        log.info("solve started", job=job.id, request=job.request_id, attempt=job.attempts)
        try:
            self._active[job.id] = ActiveJob(job, self._placement.start(task, job.request))
        except SolveLost as error:
            log.error("solve could not be started", job=job.id, reason=str(error))
            with self._database.write() as connection:
                leases.release(connection, self.name, [job.id], counts_as_attempt=True)
            time.sleep(_RETRY_INTERVAL_S)
        return True

    def _requeue(self, active: ActiveJob, reason: str) -> None:
        log.error("solve was lost and is queued again", job=active.job.id, reason=reason)
        with self._database.write() as connection:
            leases.release(connection, self.name, [active.job.id], counts_as_attempt=True)
        self._end_solve(active.job.id)

    def _read_messages(self, active: ActiveJob) -> None:
        if active.outcome is None:
            try:
                messages = active.run.messages()
            except NodeLost as error:
                self._requeue(active, str(error))
                return
            except SolveLost as error:
                problem = self._lost_solve_problem(active, error)
                active.outcome = FailureMessage(status="failed", problem=problem)
                messages = []
            # First take the answer: storing the progress fails if the store does not respond.
            for message in messages:
                if not isinstance(message, ProgressMessage):
                    active.outcome = message
            for message in messages:
                if isinstance(message, ProgressMessage):
                    self._report(active, message)
        if active.outcome is not None:
            self._finish(active, active.outcome)

    def _report(self, active: ActiveJob, message: ProgressMessage) -> None:
        progress = message.progress.model_dump()
        with self._database.write() as connection:
            leases.report(connection, self.name, active.job.id, progress, message.is_incumbent)

    def _finish(
        self, active: ActiveJob, outcome: FailureMessage | tuple[AnswerMessage, bytes]
    ) -> None:
        seconds = time.monotonic() - active.started_at_s
        id = active.job.id
        if isinstance(outcome, tuple):
            answer, body = outcome
            status = "succeeded"
            values: dict[str, Any] = {
                "body": body,
                "summary": [plan.model_dump() for plan in answer.summary],
                "is_shared": answer.is_shared,
            }
        else:
            status = outcome.status
            values = {"problem": outcome.problem.model_dump(exclude_none=True)}
        with self._database.write() as connection:
            was_owned = leases.finish(connection, self.name, id, status, seconds=seconds, **values)
        log.info(
            "solve ended",
            job=id,
            request=active.job.request_id,
            status=status if was_owned else "claimed by another worker",
            seconds=round(seconds, 3),
            process_peak_bytes=active.process_peak_bytes,
        )
        self._end_solve(id)

    def _end_solve(self, id: str) -> None:
        self._active.pop(id).run.kill()

    # -- limits -----------------------------------------------------------------------------

    def _enforce_limits(self, active: ActiveJob) -> None:
        if active.outcome is not None:
            return
        now_s, used_bytes = time.monotonic(), active.run.memory_bytes()
        active.process_peak_bytes = max(active.process_peak_bytes, used_bytes)
        limit_s = self._settings.solve_limit_s + _GRACE_S
        limit_bytes = self._settings.solve_memory_bytes
        is_full = used_bytes > limit_bytes - _FULL_BYTES
        active.full_since_s = (active.full_since_s or now_s) if is_full else None
        if active.full_since_s is not None and now_s - active.full_since_s > _FULL_TIMEOUT_S:
            problem = out_of_memory_problem(active.job.kind, limit_bytes)
        elif now_s - active.started_at_s > limit_s:
            text = f"the solve was ended after {limit_s:g} s, the limit of this service"
            problem = make_problem(500, text, "timeout")
        else:
            return
        active.run.kill()
        active.outcome = FailureMessage(status="failed", problem=problem)

    def _lost_solve_problem(self, active: ActiveJob, error: SolveLost) -> ProblemDetails:
        if active.process_peak_bytes > 0.7 * self._settings.solve_memory_bytes:
            return out_of_memory_problem(active.job.kind, self._settings.solve_memory_bytes)
        text = f"the solve ended without an answer: {error}; the service's log may say more"
        return make_problem(500, text, "crashed")

    # -- the store --------------------------------------------------------------------------

    def _drop_lost_jobs(self) -> None:
        if not self._active:
            return
        with self._database.read() as connection:
            owned = leases.owned_jobs(connection, self.name, list(self._active))
        self._drop(set(self._active) - owned)

    def _renew_leases(self) -> None:
        with self._database.write() as connection:
            ids = list(self._active)
            owned = leases.renew(connection, self.name, ids, self._settings.lease_s)
            slots = self._settings.concurrent_solves
            leases.register_worker(connection, self.name, self._devices, slots)
        self._drop(set(ids) - owned)

    def _drop(self, ids: set[str]) -> None:
        for id in ids:
            log.info("solve ended", job=id, status="cancelled, or claimed by another worker")
            self._end_solve(id)

    def _run_upkeep(self) -> None:
        with self._database.write() as connection:
            for id in upkeep.fail_lost_jobs(connection, self._settings.attempts):
                log.error("job failed", job=id, reason="its worker was lost too often")
            upkeep.delete_expired(connection, self._settings.retention_s)

    def _shut_down(self) -> None:
        ids = list(self._active)
        for id in ids:
            self._end_solve(id)
        self._placement.close()
        try:
            with self._database.write() as connection:
                leases.release(connection, self.name, ids)
                leases.unregister_worker(connection, self.name)
        except DBAPIError as error:
            log.error("the store does not respond", error=str(error.orig)[:300])
        log.info("worker stopped", worker=self.name, released_jobs=len(ids))
