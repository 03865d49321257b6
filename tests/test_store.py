"""The store's laws, on SQLite and on a real PostgreSQL: both are the same queue."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import IntegrityError
from tests import postgres

from remat.errors import ServiceError
from remat.wire import JobView
from remat_server.store import database as databases
from remat_server.store import events, jobs, keys, leases, tallies, upkeep
from remat_server.store.database import Database, now
from remat_server.store.jobs import IdempotencyConflict, NewJob
from remat_server.store.tables import metadata

T = TypeVar("T")

MIGRATIONS = Path(databases.__file__).parent / "migrations"
REQUEST = gzip.compress(b"{}", mtime=0)
SUMMARY = {
    "status": "OPTIMAL",
    "budget_bytes": 3,
    "peak_bytes": 2,
    "baseline_peak_bytes": 4,
    "time_s": 1.5,
    "baseline_time_s": 1.0,
    "overhead": 0.5,
    "lower_bound": 0.5,
    "gap": 0.002,
    "operations": 7,
    "library_bytes": 0,
}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield f"sqlite:///{tmp_path / 'jobs.sqlite'}"
        else:
            server = request.getfixturevalue("postgres_url")
            yield stack.enter_context(postgres.fresh_database(server))


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A store with its tables."""
    found = Database(url)
    found.migrate()
    yield found
    found.close()


# -- migrations -------------------------------------------------------------------------------


def test_migrations_lead_from_nothing_to_the_tables(url: str) -> None:
    database = Database(url)
    assert tables(database) == set()
    database.migrate()
    assert tables(database) == {*metadata.tables, "alembic_version"}
    assert revision(database) == ScriptDirectory(str(MIGRATIONS)).get_current_head()
    database.close()


def test_migrating_again_changes_nothing(database: Database) -> None:
    id = submitted(database)
    for _ in range(2):
        database.migrate()
    with database.read() as connection:
        assert jobs.view(connection, "ann", id) is not None


def test_migrations_and_tables_do_not_differ(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []


def test_migrations_lead_back_to_nothing(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert tables(database) == {"alembic_version"}
    assert revision(database) is None
    database.migrate()
    assert tables(database) == {*metadata.tables, "alembic_version"}


def test_threads_may_migrate_at_once(url: str) -> None:
    def migrate(_: int) -> None:
        database = Database(url)
        database.migrate()
        database.close()

    at_once(migrate, 6)
    database = Database(url)
    assert tables(database) == {*metadata.tables, "alembic_version"}
    database.close()


def test_processes_may_migrate_at_once(url: str) -> None:
    code = (
        "import sys; from remat_server.store.database import Database; "
        "database = Database(sys.argv[1]); print(flush=True); sys.stdin.read(1); "
        "database.migrate(); database.close()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout.readline() == "\n"  # it is ready
    ends = at_once(lambda i: started[i].communicate("x", timeout=60), 2)
    assert [process.returncode for process in started] == [0, 0], ends
    database = Database(url)
    assert tables(database) == {*metadata.tables, "alembic_version"}
    database.close()


def test_a_failed_migration_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(url)

    def upgrade(config: Config, revision: str) -> None:
        metadata.create_all(config.attributes["connection"])
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(databases.command, "upgrade", upgrade)
        with pytest.raises(RuntimeError, match="in the middle"):
            database.migrate()
    assert tables(database) == set()
    database.migrate()
    assert tables(database) == {*metadata.tables, "alembic_version"}
    database.close()


# -- transactions -----------------------------------------------------------------------------


def test_a_write_that_fails_leaves_nothing(database: Database) -> None:
    def submit_half_way() -> None:
        with database.write() as connection:
            jobs.submit(connection, new("a"))
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        submit_half_way()
    with database.read() as connection:
        assert upkeep.depth(connection) == {}
        assert tallies.read(connection) == {}


def test_what_a_reader_sees_is_consistent(database: Database) -> None:
    id = submitted(database)
    with database.read() as reader:
        assert viewed(reader, id).status == "queued"
        with database.write() as writer:
            assert jobs.cancel(writer, "ann", id) == "cancelled"
        assert viewed(reader, id).status == "queued"
        assert upkeep.depth(reader) == {"queued": 1}
    assert status(database, id) == "cancelled"


def test_the_clock_is_the_database_s(database: Database) -> None:
    with database.read() as connection:
        first = connection.execute(sa.select(now())).scalar_one()
    time.sleep(0.01)
    with database.read() as connection:
        second = connection.execute(sa.select(now())).scalar_one()
    assert 0.005 < second - first < 5
    assert abs(first - time.time()) < 5


def test_a_store_that_cannot_be_is_refused_without_its_password() -> None:
    with pytest.raises(ServiceError, match="REMAT_DATABASE_URL") as refused:
        Database("nosuch://ann:secret@host/name")
    assert "secret" not in str(refused.value)


def test_a_store_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    nobody = f"postgresql://ann:secret@/name?host={tmp_path}"
    for url in (nobody, f"sqlite:///{tmp_path}"):
        database = Database(url)
        with pytest.raises(ServiceError, match="does not answer") as refused:
            database.migrate()
        assert "secret" not in str(refused.value)
        database.close()


def test_a_database_without_an_encoding_holds_text(postgres_url: str) -> None:
    """Such as `createdb` makes where the locale is "C"."""
    without = "TEMPLATE template0 ENCODING SQL_ASCII LC_COLLATE 'C' LC_CTYPE 'C'"
    with postgres.fresh_database(postgres_url, without) as url:
        database = Database(url)
        database.migrate()
        with database.write() as connection:
            keys.add(connection, "Jürgen")
        with database.read() as connection:
            assert [key.name for key in keys.listed(connection)] == ["Jürgen"]
        database.close()


# -- claiming ---------------------------------------------------------------------------------


def test_jobs_are_claimed_in_order(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(3)]
    assert [claimed(database, "w").id for _ in ids] == ids
    assert claim(database, "w") is None


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


# -- leases -----------------------------------------------------------------------------------


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


# -- users ------------------------------------------------------------------------------------


def test_a_cancelled_job_is_nobody_s(database: Database) -> None:
    queued, running = submitted(database, content="q"), submitted(database, content="r")
    with database.write() as connection:
        assert jobs.cancel(connection, "bob", queued) is None, "it is not his"
        assert jobs.cancel(connection, "ann", queued) == "cancelled"
    assert claimed(database, "w").id == running
    with database.write() as connection:
        assert jobs.cancel(connection, "ann", running) == "cancelled"
    with database.read() as connection:
        assert leases.still_held(connection, "w", [running]) == set()
    assert not finish(database, "w", running)
    report(database, "w", running)
    with database.write() as connection:
        leases.give_back(connection, "w", [running])
    assert claim(database, "w") is None
    assert status(database, running) == "cancelled"
    assert kinds(database, running)[-2:] == ["status", "done"]


def test_a_job_that_ended_is_forgotten_with_its_events(database: Database) -> None:
    id = submitted(database)
    with database.write() as connection:
        jobs.cancel(connection, "ann", id)
        assert jobs.cancel(connection, "ann", id) == "forgotten"
        assert jobs.cancel(connection, "ann", id) is None
    assert numbers(database, id) == []


def test_users_see_their_own_jobs_only(database: Database) -> None:
    id = submitted(database)
    with database.read() as connection:
        assert jobs.view(connection, "ann", id) is not None
        assert jobs.view(connection, "bob", id) is None
        assert jobs.result(connection, "bob", id) is None
        assert jobs.views(connection, "bob", None, None, 10) == ([], None)
        assert jobs.active_count(connection, "ann") == 1
        assert jobs.active_count(connection, "bob") == 0


def test_ids_that_no_job_has_are_of_no_job(database: Database) -> None:
    with database.write() as connection:
        for id in ("", "nothing", "nul\0", "ü'\"; --", "x" * 64):
            assert jobs.view(connection, "ann", id) is None
            assert jobs.cancel(connection, "ann", id) is None


def test_pages_meet_without_gap_or_overlap(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(7)]
    seen: list[str] = []
    before = None
    while True:
        with database.read() as connection:
            page, before = jobs.views(connection, "ann", "queued", before, 3)
        seen += [job.id for job in page]
        if before is None:
            break
    assert seen == ids[::-1]


def test_pages_of_a_state_hold_no_other(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(5)]
    with database.write() as connection:
        for id in ids[::2]:
            jobs.cancel(connection, "ann", id)
    with database.read() as connection:
        page, before = jobs.views(connection, "ann", "cancelled", None, 2)
        rest, end = jobs.views(connection, "ann", "cancelled", before, 2)
        assert [job.id for job in (*page, *rest)] == ids[::-2]
        assert end is None
        queued, _ = jobs.views(connection, "ann", "queued", None, 9)
        assert [job.id for job in queued] == ids[3::-2]
        assert jobs.views(connection, "ann", "failed", None, 9) == ([], None)


def test_position_counts_those_before(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(3)]
    with database.read() as connection:
        assert [viewed(connection, id).position for id in ids] == [0, 1, 2]
    claimed(database, "w")
    with database.read() as connection:
        assert [viewed(connection, id).position for id in ids] == [None, 0, 1]


def test_an_idempotency_key_makes_one_job(database: Database) -> None:
    def ask(_: int) -> str | None:
        try:
            with database.write() as connection:
                return jobs.submit(connection, new("c", idempotency_key="once"))
        except IntegrityError:
            return None

    made = [id for id in at_once(ask, 4) if id is not None]
    assert len(made) == 1
    with database.read() as connection:
        assert jobs.by_idempotency_key(connection, "ann", "once", "c") == made[0]
        assert jobs.by_idempotency_key(connection, "ann", "twice", "c") is None
        assert jobs.by_idempotency_key(connection, "bob", "once", "c") is None
        with pytest.raises(IdempotencyConflict):
            jobs.by_idempotency_key(connection, "ann", "once", "other")
        assert upkeep.depth(connection) == {"queued": 1}
        assert tallies.read(connection)["submitted"] == {(("kind", "solve"),): 1.0}
    with database.write() as connection:
        jobs.submit(connection, new("c", owner="bob", idempotency_key="once"))


def test_what_was_solved_is_answered_at_once(database: Database) -> None:
    first = submitted(database)
    claimed(database, "w")
    finish(database, "w", first)
    second = submitted(database)
    with database.read() as connection:
        assert jobs.is_answered(connection, "content")
        assert viewed(connection, second).status == "succeeded"
        assert answer(connection, second) == b"body"
        assert tallies.read(connection)["answered_from_store"] == {(("kind", "solve"),): 1.0}
    assert kinds(database, second) == ["status", "done"]
    assert claim(database, "w") is None


# -- upkeep -----------------------------------------------------------------------------------


def test_what_ended_long_ago_is_forgotten(database: Database) -> None:
    ended, live = submitted(database, content="old"), submitted(database, content="new")
    claimed(database, "w")
    finish(database, "w", ended)
    with database.write() as connection:
        leases.present(connection, "w", (), 1)
        assert upkeep.clean(connection, 60.0) == 0
    age(database, 120.0)
    with database.write() as connection:
        assert upkeep.clean(connection, 60.0) == 1
    with database.read() as connection:
        assert jobs.view(connection, "ann", ended) is None
        assert jobs.view(connection, "ann", live) is not None
        assert not jobs.is_answered(connection, "old")
        assert events.after(connection, ended, 0) == []


def test_an_answer_in_use_is_kept(database: Database) -> None:
    first = submitted(database)
    claimed(database, "w")
    finish(database, "w", first)
    age(database, 120.0)
    second = submitted(database)
    with database.write() as connection:
        assert upkeep.clean(connection, 60.0) == 1
    with database.read() as connection:
        assert answer(connection, second) == b"body"


def test_an_answer_that_a_later_job_shows_is_kept(database: Database) -> None:
    """Of a job that asked the same and waited for it."""
    first, second = submitted(database), submitted(database)
    claimed(database, "w")
    finish(database, "w", first)
    age(database, 120.0)
    assert claim(database, "w") is None
    assert status(database, second) == "succeeded"
    with database.write() as connection:
        assert upkeep.clean(connection, 60.0) == 1
    with database.read() as connection:
        assert answer(connection, second) == b"body"
        assert viewed(connection, second).summary != ()


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


# -- events -----------------------------------------------------------------------------------


def test_events_are_numbered_without_gaps(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(3)]
    for _ in ids:
        claimed(database, "w")

    def tell(number: int) -> None:
        for step in range(8):
            report(database, "w", ids[(number + step) % len(ids)])

    at_once(tell, 3)
    for id in ids:
        assert finish(database, "w", id)
        found = numbers(database, id)
        assert found == list(range(1, len(found) + 1))
        assert len(found) == 2 + 8 + 2
        assert numbers(database, id, after=4) == found[4:]


# -- tallies ----------------------------------------------------------------------------------


def test_tallies_add_up(database: Database) -> None:
    def add(number: int) -> None:
        for step in range(10):
            with database.write() as connection:
                tallies.count(connection, "finished", kind="solve", status="succeeded")
                tallies.observe(connection, "solve_seconds", float(number + step), tallies.SECONDS)

    at_once(add, 4)
    with database.read() as connection:
        found = tallies.read(connection)
    assert found["finished"] == {(("kind", "solve"), ("status", "succeeded")): 40.0}
    assert sum(found["solve_seconds_bucket"].values()) == 40
    assert found["solve_seconds_bucket"][(("le", "0.1"),)] == 1
    total = sum(number + step for number in range(4) for step in range(10))
    assert found["solve_seconds_sum"] == {(): float(total)}


def test_beyond_the_last_bound_is_infinity(database: Database) -> None:
    with database.write() as connection:
        tallies.observe(connection, "gap", 0.0, tallies.GAPS)
        tallies.observe(connection, "gap", 7.0, tallies.GAPS)
    with database.read() as connection:
        found = tallies.read(connection)["gap_bucket"]
    assert found == {(("le", "0.0"),): 1.0, (("le", "+Inf"),): 1.0}


# -- keys -------------------------------------------------------------------------------------


def test_keys(database: Database) -> None:
    def owner(key: str) -> str | None:
        with database.read() as connection:
            return keys.owner_of(connection, key)

    with database.write() as connection:
        assert not keys.is_any(connection)
        id, key = keys.add(connection, "ann" * 100)
        other, other_key = keys.add(connection, "bob")
    assert owner(key) == id
    assert owner(other_key) == other
    secret = key.rpartition(f"{id}_")[2]
    for wrong in (
        "",
        "remat",
        "remat__",
        id,
        secret,
        key[:-1],
        key + "x",
        key.upper(),
        key.replace("remat", "rimat"),
        f"remat_{other}_{secret}",
        f"remat_{id}_",
        f"remat_{id}\0_{secret}",
        f"remat_{id}_ü",
    ):
        assert owner(wrong) is None, wrong
    with database.read() as connection:
        stored = connection.execute(sa.text("SELECT * FROM keys")).all()
        assert [each.name for each in keys.listed(connection)] == [("ann" * 100)[:200], "bob"]
    assert secret not in str(stored)
    with database.write() as connection:
        assert keys.revoke(connection, id)
        assert not keys.revoke(connection, id), "already"
        assert not keys.revoke(connection, "nothing")
    assert owner(key) is None
    assert owner(other_key) == other
    with database.read() as connection:
        assert keys.is_any(connection), "a service that had keys does not open again"


# -- helpers ----------------------------------------------------------------------------------


def at_once(act: Callable[[int], T], times: int) -> list[T]:
    """What `act` returns for 0, 1, ... when all begin together."""
    gate = threading.Barrier(times)

    def begin(number: int) -> T:
        gate.wait(timeout=30)
        return act(number)

    with ThreadPoolExecutor(times) as pool:
        return [each.result() for each in [pool.submit(begin, i) for i in range(times)]]


def tables(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(sa.inspect(connection).get_table_names())


def revision(database: Database) -> str | None:
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def new(content: str, *, owner: str = "ann", **given: Any) -> NewJob:
    return NewJob(owner=owner, kind="solve", content=content, request=REQUEST, **given)


def submitted(database: Database, content: str = "content", **given: Any) -> str:
    with database.write() as connection:
        return jobs.submit(connection, new(content, **given))


def claim(database: Database, worker: str, devices: tuple[str, ...] = ()) -> leases.Claimed | None:
    with database.write() as connection:
        return leases.claim(connection, worker, devices, 60.0)


def claimed(database: Database, worker: str) -> leases.Claimed:
    found = claim(database, worker)
    assert found is not None
    return found


def expire(database: Database) -> None:
    """Let all leases end."""
    with database.write() as connection:
        connection.execute(sa.text("UPDATE jobs SET lease_until = lease_until - 1000"))


def finish(
    database: Database,
    worker: str,
    id: str,
    status: str = "succeeded",
    problem: dict[str, Any] | None = None,
) -> bool:
    body, summary = (b"body", [SUMMARY]) if status == "succeeded" else (None, [])
    with database.write() as connection:
        return leases.finish(
            connection, worker, id, status, body=body, summary=summary, problem=problem, seconds=1.0
        )


def report(database: Database, worker: str, id: str) -> None:
    progress = {"phase": "cost", "elapsed_s": 1.0}
    with database.write() as connection:
        leases.report(connection, worker, id, progress, is_incumbent=False)


def status(database: Database, id: str) -> str:
    with database.read() as connection:
        return viewed(connection, id).status


def viewed(connection: sa.Connection, id: str) -> JobView:
    found = jobs.view(connection, "ann", id)
    assert found is not None
    return found[0]


def answer(connection: sa.Connection, id: str) -> bytes | None:
    found = jobs.result(connection, "ann", id)
    assert found is not None
    return found[1]


def kinds(database: Database, id: str) -> list[str]:
    with database.read() as connection:
        return [event.kind for event in events.after(connection, id, 0)]


def numbers(database: Database, id: str, after: int = 0) -> list[int]:
    with database.read() as connection:
        return [event.number for event in events.after(connection, id, after)]


def age(database: Database, seconds: float) -> None:
    """Let everything have happened earlier."""
    with database.write() as connection:
        for table, column in (
            ("jobs", "finished_at"),
            ("answers", "used_at"),
            ("workers", "seen_at"),
        ):
            text = f"UPDATE {table} SET {column} = {column} - {seconds}"
            connection.execute(sa.text(text))
