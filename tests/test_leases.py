"""Who holds a job, on SQLite and on a real PostgreSQL: claim, renew, report, finish, give back."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest
import sqlalchemy as sa
from tests import postgres
from tests.stores import (
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


def test_a_job_is_free_that_a_claim_would_find(database: Database) -> None:
    def is_any_free() -> bool:
        with database.read() as connection:
            return leases.is_any_free(connection, ())

    assert not is_any_free()
    submitted(database)
    assert is_any_free()
    claimed(database, "w")
    assert not is_any_free()
    expire(database)
    assert is_any_free()


def test_two_claimers_never_get_the_same_job(database: Database) -> None:
    ids = {submitted(database, content=f"c{i}") for i in range(24)}

    def take(number: int) -> list[str]:
        mine = []
        while True:
            job = claim(database, f"w{number}")
            if job is not None:
                mine.append(job.id)
                continue
            with database.read() as connection:
                if not leases.is_any_free(connection, ()):
                    return mine

    taken = at_once(take, 4)
    assert Counter(id for each in taken for id in each) == Counter(ids)
    with database.read() as connection:
        for number, mine in enumerate(taken):
            assert leases.still_held(connection, f"w{number}", list(ids)) == set(mine)


def test_a_job_goes_only_where_its_device_is(database: Database) -> None:
    id = submitted(database, needs="cuda")
    assert claim(database, "plain") is None
    assert claim(database, "plain", devices=("cpu",)) is None
    job = claim(database, "gpu", devices=("cpu", "cuda"))
    assert (job.id, job.needs) == (id, "cuda")


def test_what_is_being_solved_is_not_solved_twice(database: Database) -> None:
    first, second = submitted(database, content="same"), submitted(database, content="same")
    assert claimed(database, "w").id == first
    assert claim(database, "v") is None
    assert finish(database, "w", first)
    assert claim(database, "v") is None
    assert status(database, second) == "succeeded"
    with database.read() as connection:
        assert answer(connection, second) == b"body"


def test_what_failed_once_is_tried_for_the_next_who_asks(database: Database) -> None:
    first, second = submitted(database, content="same"), submitted(database, content="same")
    claimed(database, "w")
    assert finish(database, "w", first, status="failed", problem={"detail": "no"})
    assert claimed(database, "w").id == second


def test_a_job_is_answered_by_what_answers_it_alone(database: Database) -> None:
    for content in ("a", "z"):
        id = submitted(database, content=content)
        claimed(database, "w")
        finish(database, "w", id)
    id = submitted(database, content="m")
    assert claimed(database, "w").id == id


def test_other_jobs_that_are_being_solved_are_not_waited_for(database: Database) -> None:
    ids = [submitted(database, content=content) for content in ("a", "z", "m")]
    assert [claimed(database, "w").id for _ in ids] == ids


def test_who_finds_a_job_answered_goes_on_to_the_next(database: Database) -> None:
    first, second = submitted(database, content="same"), submitted(database, content="same")
    third = submitted(database, content="other")
    claimed(database, "w")
    finish(database, "w", first)
    assert claimed(database, "v").id == third
    assert status(database, second) == "succeeded"


def test_a_claimer_does_not_wait_for_another(postgres_url: str) -> None:
    """Nor does one lock more than it takes. SQLite has one lock for all."""
    with postgres.fresh_database(postgres_url) as url:
        database = Database(url)
        database.migrate()
        ids = [submitted(database, content=f"c{i}") for i in range(2)]
        with database.write() as one, database.write() as other:
            other.execute(sa.text("SET LOCAL lock_timeout = '10s'"))
            taken = [leases.claim(each, "w", (), 60.0) for each in (one, other)]
        assert [job.id for job in taken if job is not None] == ids
        database.close()


def test_a_claim_does_not_change(database: Database) -> None:
    submitted(database)
    with pytest.raises(FrozenInstanceError):
        claimed(database, "w").id = "another"  # type: ignore[misc]


# -- leases -----------------------------------------------------------------------------------


def test_a_lease_ends_when_it_was_said(database: Database) -> None:
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


def test_what_is_done_with_a_job_is_done_with_that_one(database: Database) -> None:
    """By who has it, and not by who is before or after him, or has those beside it."""
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
            assert leases.still_held(connection, worker, ids) == set()
            assert not leases.finish(connection, worker, id, "failed", seconds=1.0)
            leases.report(connection, worker, id, progress, is_incumbent=False)
            leases.give_back(connection, worker, ids)
        assert leases.still_held(connection, "m", ids) == set(ids)
        assert leases.still_held(connection, "m", [id]) == {id}
        assert leases.renew(connection, "m", [id], 15.0) == {id}
        assert [viewed(connection, each).progress for each in ids] == [None] * 3
        leases.report(connection, "m", id, progress, is_incumbent=False)
        assert [viewed(connection, each).progress is None for each in ids] == [True, False, True]
        leases.give_back(connection, "m", [id])
        assert leases.still_held(connection, "m", ids) == {before, after}
        assert not leases.finish(connection, "m", id, "failed", seconds=1.0)
    assert claimed(database, "other").id == id
    assert not finish(database, "m", id)
    assert finish(database, "other", id)
    assert [status(database, each) for each in ids] == ["running", "succeeded", "running"]
    assert [kinds(database, each) for each in (before, after)] == [["status", "status"]] * 2
    with database.read() as connection:
        stored = connection.execute(sa.select(tables.answers.c.content)).scalars().all()
        content = sa.select(tables.jobs.c.content).where(tables.jobs.c.id == id)
        assert stored == [connection.execute(content).scalar_one()]


def test_each_claim_is_an_attempt_but_for_one_that_is_given_back(database: Database) -> None:
    id = submitted(database)
    for attempt in (1, 2, 3):
        for is_attempt in (False, True):
            assert claimed(database, "w").attempts == attempt
            with database.write() as connection:
                leases.give_back(connection, "w", [id], is_attempt=is_attempt)
    assert kinds(database, id) == ["status"] * (1 + 6 * 2)
    with database.read() as connection:
        told = [event.data["status"] for event in events.after(connection, id, 0)]
    assert told == ["queued", *(["running", "queued"] * 6)]


def test_how_jobs_end_is_tallied(database: Database) -> None:
    """The gaps of those plans that have one."""
    id, other = submitted(database, content="a"), submitted(database, content="b")
    for _ in range(2):
        claimed(database, "w")
    with database.write() as connection:
        summary = [SUMMARY, SUMMARY | {"gap": None}, SUMMARY | {"gap": 0.3}]
        leases.finish(connection, "w", id, "succeeded", body=b"", summary=summary, seconds=2.0)
        leases.finish(connection, "w", other, "failed", problem={"detail": "no"}, seconds=0.25)
        found = tallies.read(connection)
    solve = ("kind", "solve")
    assert found["finished"] == {
        (solve, ("status", "succeeded")): 1.0,
        (solve, ("status", "failed")): 1.0,
    }
    assert found["solve_seconds_bucket"] == {(("le", "2.5"),): 1.0, (("le", "0.5"),): 1.0}
    assert found["solve_seconds_sum"] == {(): 2.25}
    assert found["gap_bucket"] == {(("le", "0.0025"),): 1.0, (("le", "0.5"),): 1.0}
    assert found["gap_sum"] == {(): pytest.approx(0.302)}


def test_a_job_whose_lease_ended_is_claimed_again(database: Database) -> None:
    id = submitted(database)
    assert claimed(database, "dead").attempts == 1
    assert claim(database, "alive") is None
    expire(database)
    again = claimed(database, "alive")
    assert (again.id, again.attempts, again.request) == (id, 2, REQUEST)
    with database.write() as connection:
        assert leases.renew(connection, "dead", [id], 15.0) == set()
    with database.read() as connection:
        assert leases.still_held(connection, "dead", [id]) == set()


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
            found = viewed(connection, id)
        return found, found.started_at or 0.0, found.finished_at or 0.0

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


def test_every_change_of_a_job_is_another_revision(database: Database) -> None:
    """Of which its ETag is made."""
    id, other = submitted(database, content="a"), submitted(database, content="b")

    def revision(id: str = id) -> int:
        with database.read() as connection:
            found = jobs.view(connection, "ann", id)
        assert found is not None
        return found[1]

    def give_back() -> None:
        with database.write() as connection:
            leases.give_back(connection, "w", [id])

    seen = [revision()]
    for change in (
        lambda: claimed(database, "w"),
        lambda: report(database, "w", id),
        give_back,
        lambda: claimed(database, "w"),
        lambda: finish(database, "w", id),
    ):
        change()
        seen.append(revision())
    assert seen == sorted(set(seen))
    before = revision(other)
    with database.write() as connection:
        jobs.cancel(connection, "ann", other)
    assert revision(other) > before
    assert revision() == seen[-1], "nothing of it has changed"


def test_only_who_holds_a_job_can_finish_or_report(database: Database) -> None:
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
    assert not finish(database, "alive", id), "it has ended"
    assert status(database, id) == "succeeded"


def test_one_of_two_finishers_wins(database: Database) -> None:
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


def test_a_better_schedule_is_an_event_of_its_own(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    report(database, "w", id)
    with database.write() as connection:
        leases.report(connection, "w", id, {"phase": "cost"}, is_incumbent=True)
    assert kinds(database, id)[-2:] == ["progress", "incumbent"]


def test_a_job_given_back_is_queued_again(database: Database) -> None:
    id = submitted(database)
    claimed(database, "w")
    with database.write() as connection:
        leases.give_back(connection, "another", [id])
    assert status(database, id) == "running"
    with database.write() as connection:
        leases.give_back(connection, "w", [id])
    assert status(database, id) == "queued"
    assert claimed(database, "w").attempts == 1, "a drained worker is no attempt"
    with database.write() as connection:
        leases.give_back(connection, "w", [id], is_attempt=True)
    assert claimed(database, "w").attempts == 2


def test_a_job_that_loses_every_worker_fails(database: Database) -> None:
    id = submitted(database)
    for _ in range(2):
        claimed(database, "w")
        expire(database)
    with database.write() as connection:
        assert upkeep.fail_hopeless(connection, attempts=3) == []
        assert upkeep.fail_hopeless(connection, attempts=2) == [id]
    with database.read() as connection:
        job = viewed(connection, id)
    assert job.status == "failed"
    assert job.problem is not None
    assert job.problem.type.endswith("worker-lost")
    assert kinds(database, id)[-1] == "done"


# -- workers ----------------------------------------------------------------------------------


def test_workers_come_and_go(database: Database) -> None:
    with database.write() as connection:
        leases.present(connection, "a", ("cpu",), 2)
        leases.present(connection, "a", ("cpu", "cuda"), 4)
        leases.present(connection, "b", (), 1)
    with database.read() as connection:
        assert leases.worker_count(connection, 60.0) == 2
        assert leases.devices_present(connection, 15.0) == {"cpu", "cuda"}
        assert leases.worker_count(connection, -1.0) == 0
    with database.write() as connection:
        leases.leave(connection, "a")
    with database.read() as connection:
        assert leases.worker_count(connection, 60.0) == 1
        assert leases.devices_present(connection, 15.0) == set()


def test_who_goes_goes_alone(database: Database) -> None:
    with database.write() as connection:
        for name in "abc":
            leases.present(connection, name, (name,), 1)
        leases.leave(connection, "b")
        assert leases.devices_present(connection, 15.0) == {"a", "c"}


def test_workers_that_are_silent_are_not_there(database: Database) -> None:
    def seen() -> tuple[int, set[str]]:
        with database.read() as connection:
            count = leases.worker_count(connection, 60.0)
            return count, leases.devices_present(connection, 60.0)

    with database.write() as connection:
        leases.present(connection, "a", ("cpu",), 1)
        leases.present(connection, "b", ("cuda",), 1)
    assert seen() == (2, {"cpu", "cuda"})
    age(database, 120.0)
    assert seen() == (0, set())
    with database.write() as connection:
        leases.present(connection, "a", ("cpu",), 1)
    assert seen() == (1, {"cpu"})
