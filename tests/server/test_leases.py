"""Leases of jobs, on SQLite and on a real PostgreSQL: claim, renew, report, finish, release."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest
import sqlalchemy as sa
from tests.helpers.service import postgres
from tests.helpers.service.job_store import (
    REQUEST,
    SUMMARY,
    age,
    answer,
    at_once,
    claim,
    claimed,
    expire,
    finish,
    kinds,
    numbers,
    report,
    status,
    submitted,
    viewed,
)

from remat.service.wire import JobView
from remat_server.store import events, jobs, leases, tables, tallies, upkeep
from remat_server.store.database import Database, now

# -- claiming ---------------------------------------------------------------------------------


def test_jobs_are_claimed_in_order(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(3)]
    assert [claimed(database, "w").id for _ in ids] == ids
    assert claim(database, "w") is None


def test_a_free_job_is_one_that_a_claim_would_take(database: Database) -> None:
    def has_claimable_job() -> bool:
        with database.read() as connection:
            return leases.has_claimable_job(connection, ())

    assert not has_claimable_job()
    submitted(database)
    assert has_claimable_job()
    claimed(database, "w")
    assert not has_claimable_job()
    expire(database)
    assert has_claimable_job()


def test_two_claimers_never_get_the_same_job(database: Database) -> None:
    ids = {submitted(database, content=f"c{i}") for i in range(24)}

    def take(number: int) -> list[str]:
        own_claims = []
        while True:
            job = claim(database, f"w{number}")
            if job is not None:
                own_claims.append(job.id)
                continue
            with database.read() as connection:
                if not leases.has_claimable_job(connection, ()):
                    return own_claims

    taken = at_once(take, 4)
    assert Counter(id for claims in taken for id in claims) == Counter(ids)
    with database.read() as connection:
        for number, actual in enumerate(taken):
            assert leases.owned_jobs(connection, f"w{number}", list(ids)) == set(actual)


def test_a_job_goes_only_where_its_device_is(database: Database) -> None:
    id = submitted(database, needs="cuda")
    assert claim(database, "plain") is None
    assert claim(database, "plain", devices=("cpu",)) is None
    job = claim(database, "gpu", devices=("cpu", "cuda"))
    assert (job.id, job.needs) == (id, "cuda")


def test_equal_running_jobs_are_solved_once(database: Database) -> None:
    first, second = submitted(database, content="same"), submitted(database, content="same")
    assert claimed(database, "w").id == first
    assert claim(database, "v") is None
    assert finish(database, "w", first)
    assert claim(database, "v") is None
    assert status(database, second) == "succeeded"
    with database.read() as connection:
        assert answer(connection, second) == b"body"


def test_a_failed_solve_is_retried_for_the_next_equal_job(database: Database) -> None:
    first, second = submitted(database, content="same"), submitted(database, content="same")
    claimed(database, "w")
    assert finish(database, "w", first, status="failed", problem={"detail": "no"})
    assert claimed(database, "w").id == second


def test_a_job_gets_the_answer_of_an_equal_job_only(database: Database) -> None:
    for content in ("a", "z"):
        id = submitted(database, content=content)
        claimed(database, "w")
        finish(database, "w", id)
    id = submitted(database, content="m")
    assert claimed(database, "w").id == id


def test_claims_do_not_wait_for_unequal_running_jobs(database: Database) -> None:
    ids = [submitted(database, content=content) for content in ("a", "z", "m")]
    assert [claimed(database, "w").id for _ in ids] == ids


def test_a_claim_skips_jobs_that_are_already_answered(database: Database) -> None:
    first, second = submitted(database, content="same"), submitted(database, content="same")
    third = submitted(database, content="other")
    claimed(database, "w")
    finish(database, "w", first)
    assert claimed(database, "v").id == third
    assert status(database, second) == "succeeded"


def test_concurrent_claims_do_not_wait_for_each_other(postgres_url: str) -> None:
    """Nor does one lock more than it takes. SQLite has one lock for all."""
    with postgres.fresh_database(postgres_url) as url:
        database = Database(url)
        database.migrate()
        ids = [submitted(database, content=f"c{i}") for i in range(2)]
        with database.write() as one, database.write() as other:
            other.execute(sa.text("SET LOCAL lock_timeout = '10s'"))
            taken = [leases.claim(job_id, "w", (), 60.0) for job_id in (one, other)]
        assert [job.id for job in taken if job is not None] == ids
        database.close()


def test_a_claim_is_immutable(database: Database) -> None:
    submitted(database)
    with pytest.raises(FrozenInstanceError):
        claimed(database, "w").id = "another"  # type: ignore[misc]


# -- leases -----------------------------------------------------------------------------------


def test_a_lease_ends_after_its_duration(database: Database) -> None:
    def left_s() -> float:
        with database.read() as connection:
            until = sa.select(tables.jobs.c.lease_until - now())
            return connection.execute(until).scalar_one()

    id = submitted(database)
    claimed(database, "w")
    assert 30 < left_s() <= 60
    with database.write() as connection:
        leases.renew(connection, "w", [id], 600.0)
    assert 570 < left_s() <= 600


def test_operations_on_a_job_affect_only_that_job(database: Database) -> None:
    """They are those of the current holder, not of earlier or later holders, and leave its other
    jobs alone."""
    ids = sorted(submitted(database, content=f"c{i}") for i in range(3))
    before, id, after = ids

    def claim_all(worker: str) -> None:
        for _ in ids:
            claimed(database, worker)

    claim_all("m")
    progress = {"phase": "cost", "elapsed_s": 1.0}
    with database.write() as connection:
        for worker in "az":
            assert leases.renew(connection, worker, ids, 15.0) == set()
            assert leases.owned_jobs(connection, worker, ids) == set()
            assert not leases.finish(connection, worker, id, "failed", seconds=1.0)
            leases.report(connection, worker, id, progress, is_incumbent=False)
            leases.release(connection, worker, ids)
        assert leases.owned_jobs(connection, "m", ids) == set(ids)
        assert leases.owned_jobs(connection, "m", [id]) == {id}
        assert leases.renew(connection, "m", [id], 15.0) == {id}
        assert [viewed(connection, job_id).progress for job_id in ids] == [None] * 3
        leases.report(connection, "m", id, progress, is_incumbent=False)
        assert [viewed(connection, job_id).progress is None for job_id in ids] == [
            True,
            False,
            True,
        ]
        leases.release(connection, "m", [id])
        assert leases.owned_jobs(connection, "m", ids) == {before, after}
        assert not leases.finish(connection, "m", id, "failed", seconds=1.0)
    assert claimed(database, "other").id == id
    assert not finish(database, "m", id)
    assert finish(database, "other", id)
    assert [status(database, job_id) for job_id in ids] == ["running", "succeeded", "running"]
    assert [kinds(database, job_id) for job_id in (before, after)] == [["status", "status"]] * 2
    with database.read() as connection:
        stored = connection.execute(sa.select(tables.answers.c.content)).scalars().all()
        content = sa.select(tables.jobs.c.content).where(tables.jobs.c.id == id)
        assert stored == [connection.execute(content).scalar_one()]


def test_every_claim_counts_as_an_attempt_unless_it_is_given_back(database: Database) -> None:
    id = submitted(database)
    for attempt in (1, 2, 3):
        for counts_as_attempt in (False, True):
            assert claimed(database, "w").attempts == attempt
            with database.write() as connection:
                leases.release(connection, "w", [id], counts_as_attempt=counts_as_attempt)
    assert kinds(database, id) == ["status"] * (1 + 6 * 2)
    with database.read() as connection:
        statuses = [event.data["status"] for event in events.events_after(connection, id, 0)]
    assert statuses == ["queued", *(["running", "queued"] * 6)]


def test_ends_of_jobs_are_counted(database: Database) -> None:
    """With the gaps of the plans that have one."""
    id, other = submitted(database, content="a"), submitted(database, content="b")
    for _ in range(2):
        claimed(database, "w")
    with database.write() as connection:
        summary = [SUMMARY, SUMMARY | {"gap": None}, SUMMARY | {"gap": 0.3}]
        leases.finish(connection, "w", id, "succeeded", body=b"", summary=summary, seconds=2.0)
        leases.finish(connection, "w", other, "failed", problem={"detail": "no"}, seconds=0.25)
        counts = tallies.read(connection)
    solve = ("kind", "solve")
    assert counts["finished"] == {
        (solve, ("status", "succeeded")): 1.0,
        (solve, ("status", "failed")): 1.0,
    }
    assert counts["solve_seconds_bucket"] == {(("le", "2.5"),): 1.0, (("le", "0.5"),): 1.0}
    assert counts["solve_seconds_sum"] == {(): 2.25}
    assert counts["gap_bucket"] == {(("le", "0.0025"),): 1.0, (("le", "0.5"),): 1.0}
    assert counts["gap_sum"] == {(): pytest.approx(0.302)}


def test_a_job_with_an_expired_lease_is_reclaimed(database: Database) -> None:
    id = submitted(database)
    assert claimed(database, "dead").attempts == 1
    assert claim(database, "alive") is None
    expire(database)
    second = claimed(database, "alive")
    assert (second.id, second.attempts, second.request) == (id, 2, REQUEST)
    with database.write() as connection:
        assert leases.renew(connection, "dead", [id], 15.0) == set()
    with database.read() as connection:
        assert leases.owned_jobs(connection, "dead", [id]) == set()


def test_a_renewed_lease_does_not_end(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    expire(database)
    with database.write() as connection:
        assert leases.renew(connection, "w", [id, "another"], 15.0) == {id}
        assert leases.renew(connection, "w", [], 15.0) == set()
    assert claim(database, "v") is None


def test_progress_and_start_are_those_of_the_attempt(database: Database) -> None:
    id = submitted(database)

    def seen() -> tuple[JobView, float, float]:
        with database.read() as connection:
            job = viewed(connection, id)
        return job, job.started_at or 0.0, job.finished_at or 0.0

    claimed(database, "dead")
    report(database, "dead", id)
    job, first, _ = seen()
    assert job.progress is not None
    assert job.created_at <= first
    expire(database)
    time.sleep(0.01)
    claimed(database, "alive")
    job, second, _ = seen()
    assert job.progress is None
    assert first < second
    assert finish(database, "alive", id)
    job, last, end = seen()
    assert job.created_at <= last == second <= end


def test_every_change_of_a_job_raises_its_revision(database: Database) -> None:
    """The ETag is derived from the revision."""
    id, other = submitted(database, content="a"), submitted(database, content="b")

    def revision(id: str = id) -> int:
        with database.read() as connection:
            job = jobs.view(connection, "ann", id)
        assert job is not None
        return job[1]

    def release() -> None:
        with database.write() as connection:
            leases.release(connection, "w", [id])

    seen = [revision()]
    for change in (
        lambda: claimed(database, "w"),
        lambda: report(database, "w", id),
        release,
        lambda: claimed(database, "w"),
        lambda: finish(database, "w", id),
    ):
        change()
        seen.append(revision())
    assert seen == sorted(set(seen))
    before = revision(other)
    with database.write() as connection:
        jobs.cancel_or_delete(connection, "ann", other)
    assert revision(other) > before
    assert revision() == seen[-1], "the job has not changed"


def test_only_the_lease_holder_can_finish_or_report(database: Database) -> None:
    id = submitted(database)
    claimed(database, "dead")
    expire(database)
    claimed(database, "alive")
    before = numbers(database, id)
    report(database, "dead", id)
    assert not finish(database, "dead", id)
    assert numbers(database, id) == before
    assert status(database, id) == "running"
    assert finish(database, "alive", id)
    assert not finish(database, "alive", id), "the process has ended"
    assert status(database, id) == "succeeded"


def test_only_one_of_two_concurrent_finishes_succeeds(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    assert sorted(at_once(lambda _: finish(database, "w", id), 4)) == [False, False, False, True]
    assert kinds(database, id) == ["status", "status", "status", "done"]


def test_finished_jobs_hold_no_request(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    finish(database, "w", id)
    with database.read() as connection:
        row = connection.execute(sa.text("SELECT request, worker, lease_until FROM jobs")).one()
        assert answer(connection, id) == b"body"
        view = viewed(connection, id)
    assert tuple(row) == (None, None, None)
    assert view.summary[0].model_dump() == SUMMARY


def test_a_better_schedule_is_a_separate_event(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    report(database, "w", id)
    with database.write() as connection:
        leases.report(connection, "w", id, {"phase": "cost"}, is_incumbent=True)
    assert kinds(database, id)[-2:] == ["progress", "incumbent"]


def test_a_released_job_returns_to_the_queue(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    with database.write() as connection:
        leases.release(connection, "another", [id])
    assert status(database, id) == "running"
    with database.write() as connection:
        leases.release(connection, "w", [id])
    assert status(database, id) == "queued"
    assert claimed(database, "w").attempts == 1, "a drained worker is no attempt"
    with database.write() as connection:
        leases.release(connection, "w", [id], counts_as_attempt=True)
    assert claimed(database, "w").attempts == 2


def test_a_job_that_loses_every_worker_fails(database: Database) -> None:
    id = submitted(database)
    for _ in range(2):
        claimed(database, "w")
        expire(database)
    with database.write() as connection:
        assert upkeep.fail_lost_jobs(connection, attempts=3) == []
        assert upkeep.fail_lost_jobs(connection, attempts=2) == [id]
    with database.read() as connection:
        job = viewed(connection, id)
    assert job.status == "failed"
    assert job.problem is not None
    assert job.problem.type.endswith("worker-lost")
    assert kinds(database, id)[-1] == "done"


# -- workers ----------------------------------------------------------------------------------


def test_workers_come_and_go(database: Database) -> None:
    with database.write() as connection:
        leases.register_worker(connection, "a", ("cpu",), 2)
        leases.register_worker(connection, "a", ("cpu", "cuda"), 4)
        leases.register_worker(connection, "b", (), 1)
    with database.read() as connection:
        assert leases.worker_count(connection, 60.0) == 2
        assert leases.available_devices(connection, 15.0) == {"cpu", "cuda"}
        assert leases.worker_count(connection, -1.0) == 0
    with database.write() as connection:
        leases.unregister_worker(connection, "a")
    with database.read() as connection:
        assert leases.worker_count(connection, 60.0) == 1
        assert leases.available_devices(connection, 15.0) == set()


def test_a_leaving_worker_does_not_affect_the_others(database: Database) -> None:
    with database.write() as connection:
        for name in "abc":
            leases.register_worker(connection, name, (name,), 1)
        leases.unregister_worker(connection, "b")
        assert leases.available_devices(connection, 15.0) == {"a", "c"}


def test_silent_workers_are_not_listed(database: Database) -> None:
    def seen() -> tuple[int, set[str]]:
        with database.read() as connection:
            count = leases.worker_count(connection, 60.0)
            return count, leases.available_devices(connection, 60.0)

    with database.write() as connection:
        leases.register_worker(connection, "a", ("cpu",), 1)
        leases.register_worker(connection, "b", ("cuda",), 1)
    assert seen() == (2, {"cpu", "cuda"})
    age(database, 120.0)
    assert seen() == (0, set())
    with database.write() as connection:
        leases.register_worker(connection, "a", ("cpu",), 1)
    assert seen() == (1, {"cpu"})
