"""The worker: takes jobs from the store, solves each in a process, and tells the store.

Everything that happens is in the store, so a worker may vanish at any moment: its leases end, and
another takes its jobs. The loop waits for what the processes say, renews leases, sees which jobs
were cancelled, and keeps each solve within its memory and its time.
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

from remat.service.wire import Problem
from remat_server.problems import out_of_memory, problem
from remat_server.settings import Settings
from remat_server.store import leases, upkeep
from remat_server.store.database import Database
from remat_server.store.leases import Claimed
from remat_server.work.messages import Advanced, Answered, Failed, Task
from remat_server.work.placements.interface import Gone, Lost, Placement, Run

log = structlog.get_logger()

_POLL_S = 0.05
_LOOK_S = 0.25
_UPKEEP_S = 10.0
_GRACE_S = 60.0
"""Beyond its time limit a solve may take this long to measure, and to write its answer."""
_PATIENCE_S = 1.0

_FULL_BYTES, _FULL_S = 2 << 20, 10.0
"""A solve that has held all but so many bytes of its memory for so long will not end: a Python
without memory for an exception goes round in circles (CPython 3.11), and answers to nobody."""


@dataclass
class Active:
    """A job that is being solved here."""

    job: Claimed
    run: Run
    began: float = field(default_factory=time.monotonic)
    peak_bytes: int = 0
    full_since: float | None = None
    """Since when its memory has been used up."""
    outcome: Failed | tuple[Answered, bytes] | None = None
    """What is to be told to the store: kept until the store has it."""


class Worker:
    """Solves jobs until it is stopped. `devices` are the types of device it can measure on."""

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
        self._active: dict[str, Active] = {}
        self._stop_at: float | None = None
        self._due: dict[str, float] = {}

    def stop(self, signum: int = 0, frame: object = None) -> None:
        """Take no more jobs, and end once those under way are done or `drain_s` is over."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._settings.drain_s

    def run(self) -> None:
        """Work until `stop`. The store may be gone for a while: solves go on."""
        log.info("worker starts", worker=self.name, slots=self._settings.concurrent_solves)
        while not self._is_done():
            runs = [a.run for a in self._active.values() if a.outcome is None]
            self._placement.wait(runs, _POLL_S)
            try:
                self._turn()
            except DBAPIError as error:
                log.error("the store does not answer", error=str(error.orig)[:300])
                time.sleep(_PATIENCE_S)
        self._end()

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._active or time.monotonic() > self._stop_at

    def _turn(self) -> None:
        for active in list(self._active.values()):
            self._hear(active)
        if self._is_due("look", _LOOK_S):
            self._drop_what_is_not_ours()
            for active in list(self._active.values()):
                self._keep_within_limits(active)
        if self._is_due("lease", self._settings.lease_s / 3):
            self._renew()
        if self._is_due("upkeep", _UPKEEP_S):
            self._tidy()
        while self._stop_at is None and len(self._active) < self._settings.concurrent_solves:
            if not self._claim():
                return

    def _is_due(self, what: str, every_s: float) -> bool:
        if time.monotonic() < self._due.get(what, 0.0):
            return False
        self._due[what] = time.monotonic() + every_s
        return True

    # -- jobs -------------------------------------------------------------------------------

    def _claim(self) -> bool:
        with self._database.read() as connection:
            if not leases.is_any_free(connection, self._devices):
                return False
        with self._database.write() as connection:
            job = leases.claim(connection, self.name, self._devices, self._settings.lease_s)
        if job is None:
            return False
        if job.id in self._active:  # its lease ended, yet it is being solved here
            return True
        task = Task(
            kind="sweep" if job.kind == "sweep" else "solve",
            memory_bytes=self._settings.solve_memory_bytes,
            niceness=self._settings.niceness,
            threads=self._settings.threads_per_solve,
            device=job.needs,
        )
        log.info("solve starts", job=job.id, request=job.request_id, attempt=job.attempts)
        try:
            self._active[job.id] = Active(job, self._placement.start(task, job.request))
        except Lost as lost:
            log.error("solve does not start", job=job.id, reason=str(lost))
            with self._database.write() as connection:
                leases.give_back(connection, self.name, [job.id], is_attempt=True)
            time.sleep(_PATIENCE_S)
        return True

    def _queue_again(self, active: Active, reason: str) -> None:
        log.error("solve is lost and queued again", job=active.job.id, reason=reason)
        with self._database.write() as connection:
            leases.give_back(connection, self.name, [active.job.id], is_attempt=True)
        self._let_go(active.job.id)

    def _hear(self, active: Active) -> None:
        if active.outcome is None:
            try:
                said = active.run.messages()
            except Gone as gone:
                self._queue_again(active, str(gone))
                return
            except Lost as lost:
                problem = self._why_lost(active, lost)
                active.outcome = Failed(status="failed", problem=problem)
                said = []
            for message in said:  # the answer first: the store may be gone for the rest
                if not isinstance(message, Advanced):
                    active.outcome = message
            for message in said:
                if isinstance(message, Advanced):
                    self._report(active, message)
        if active.outcome is not None:
            self._finish(active, active.outcome)

    def _report(self, active: Active, message: Advanced) -> None:
        progress = message.progress.model_dump()
        with self._database.write() as connection:
            leases.report(connection, self.name, active.job.id, progress, message.is_incumbent)

    def _finish(self, active: Active, said: Failed | tuple[Answered, bytes]) -> None:
        seconds = time.monotonic() - active.began
        id = active.job.id
        if isinstance(said, tuple):
            answered, body = said
            status = "succeeded"
            told: dict[str, Any] = {
                "body": body,
                "summary": [each.model_dump() for each in answered.summary],
                "is_shared": answered.is_shared,
            }
        else:
            status = said.status
            told = {"problem": said.problem.model_dump(exclude_none=True)}
        with self._database.write() as connection:
            was_ours = leases.finish(connection, self.name, id, status, seconds=seconds, **told)
        log.info(
            "solve ends",
            job=id,
            request=active.job.request_id,
            status=status if was_ours else "taken by another",
            seconds=round(seconds, 3),
            peak_bytes=active.peak_bytes,
        )
        self._let_go(id)

    def _let_go(self, id: str) -> None:
        self._active.pop(id).run.kill()

    # -- limits -----------------------------------------------------------------------------

    def _keep_within_limits(self, active: Active) -> None:
        if active.outcome is not None:
            return
        now, held_bytes = time.monotonic(), active.run.memory_bytes()
        active.peak_bytes = max(active.peak_bytes, held_bytes)
        limit_s = self._settings.solve_limit_s + _GRACE_S
        limit_bytes = self._settings.solve_memory_bytes
        is_full = held_bytes > limit_bytes - _FULL_BYTES
        active.full_since = (active.full_since or now) if is_full else None
        if active.full_since is not None and now - active.full_since > _FULL_S:
            found = out_of_memory(limit_bytes)
        elif now - active.began > limit_s:
            text = f"the solve was ended after {limit_s:g} s, the most that this service allows"
            found = problem(500, text, "timeout")
        else:
            return
        active.run.kill()
        active.outcome = Failed(status="failed", problem=found)

    def _why_lost(self, active: Active, lost: Lost) -> Problem:
        if active.peak_bytes > 0.7 * self._settings.solve_memory_bytes:
            return out_of_memory(self._settings.solve_memory_bytes)
        text = f"the solve ended without an answer: {lost}; the service's log may say more"
        return problem(500, text, "crashed")

    # -- the store --------------------------------------------------------------------------

    def _drop_what_is_not_ours(self) -> None:
        if not self._active:
            return
        with self._database.read() as connection:
            held = leases.still_held(connection, self.name, list(self._active))
        self._drop(set(self._active) - held)

    def _renew(self) -> None:
        with self._database.write() as connection:
            ids = list(self._active)
            kept = leases.renew(connection, self.name, ids, self._settings.lease_s)
            leases.present(connection, self.name, self._devices, self._settings.concurrent_solves)
        self._drop(set(ids) - kept)

    def _drop(self, ids: set[str]) -> None:
        for id in ids:
            log.info("solve ends", job=id, status="cancelled or taken by another")
            self._let_go(id)

    def _tidy(self) -> None:
        with self._database.write() as connection:
            for id in upkeep.fail_hopeless(connection, self._settings.attempts):
                log.error("job fails", job=id, reason="its worker was lost too often")
            upkeep.clean(connection, self._settings.retention_s)

    def _end(self) -> None:
        ids = list(self._active)
        for id in ids:
            self._let_go(id)
        self._placement.close()
        try:
            with self._database.write() as connection:
                leases.give_back(connection, self.name, ids)
                leases.leave(connection, self.name)
        except DBAPIError as error:
            log.error("the store does not answer", error=str(error.orig)[:300])
        log.info("worker ends", worker=self.name, given_back=len(ids))
