"""The store's laws, on SQLite and on a real PostgreSQL: both are the same queue."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import IntegrityError
from tests.helpers.process_limit import PROCESS_LIMIT_S
from tests.helpers.service import postgres
from tests.helpers.service.job_store import (
    age,
    answer,
    at_once,
    claim,
    claimed,
    finish,
    kinds,
    new,
    numbers,
    report,
    status,
    submitted,
    viewed,
)

from remat.errors import ServiceError
from remat_server.store import database as databases
from remat_server.store import events, jobs, keys, leases, tallies, upkeep
from remat_server.store.database import Database, now
from remat_server.store.jobs import IdempotencyConflict
from remat_server.store.tables import metadata

MIGRATIONS = Path(databases.__file__).parent / "migrations"


# -- migrations -------------------------------------------------------------------------------


def test_migrations_create_the_tables(url: str) -> None:
    database = Database(url)
    assert tables(database) == set()
    database.migrate()
    assert tables(database) == {*metadata.tables, "alembic_version"}
    assert revision(database) == ScriptDirectory(str(MIGRATIONS)).get_current_head()
    database.close()


def test_a_second_migration_changes_nothing(database: Database) -> None:
    id = submitted(database)
    for _ in range(2):
        database.migrate()
    with database.read() as connection:
        assert jobs.view(connection, "ann", id) is not None


def test_migrations_create_the_declared_tables(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []


def test_migrations_can_be_reverted(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert tables(database) == {"alembic_version"}
    assert revision(database) is None
    database.migrate()
    assert tables(database) == {*metadata.tables, "alembic_version"}


def test_threads_may_migrate_concurrently(url: str) -> None:
    def migrate(_: int) -> None:
        database = Database(url)
        database.migrate()
        database.close()

    at_once(migrate, 6)
    database = Database(url)
    assert tables(database) == {*metadata.tables, "alembic_version"}
    database.close()


@pytest.mark.slow
def test_a_new_file_may_be_opened_concurrently(tmp_path: Path) -> None:
    """Where two processes switch a new file to WAL at the same moment, SQLite reports to one that
    it is locked."""

    def open_(database: Database) -> None:
        with database.write() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS found (x)")

    for number in range(100):
        few = [Database(f"sqlite:///{tmp_path}/{number}.sqlite") for _ in range(4)]
        at_once(lambda i, few=few: open_(few[i]), len(few))
        for database in few:
            database.close()


@pytest.mark.slow
def test_processes_may_migrate_concurrently(url: str) -> None:
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
    ends = at_once(lambda i: started[i].communicate("x", timeout=PROCESS_LIMIT_S), 2)
    assert [process.returncode for process in started] == [0, 0], ends
    database = Database(url)
    assert tables(database) == {*metadata.tables, "alembic_version"}
    database.close()


def test_a_failed_migration_is_rolled_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_failed_write_is_rolled_back(database: Database) -> None:
    def submit_and_fail() -> None:
        with database.write() as connection:
            jobs.submit(connection, new("a"))
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        submit_and_fail()
    with database.read() as connection:
        assert upkeep.job_counts(connection) == {}
        assert tallies.read(connection) == {}


def test_readers_see_a_consistent_snapshot(database: Database) -> None:
    id = submitted(database)
    with database.read() as reader:
        assert viewed(reader, id).status == "queued"
        with database.write() as writer:
            assert jobs.cancel_or_delete(writer, "ann", id) == "cancelled"
        assert viewed(reader, id).status == "queued"
        assert upkeep.job_counts(reader) == {"queued": 1}
    assert status(database, id) == "cancelled"


def test_the_clock_is_the_database_s(database: Database) -> None:
    with database.read() as connection:
        first = connection.execute(sa.select(now())).scalar_one()
    time.sleep(0.01)
    with database.read() as connection:
        second = connection.execute(sa.select(now())).scalar_one()
    assert 0.005 < second - first < 5
    assert abs(first - time.time()) < 5


def test_an_invalid_store_is_refused_without_showing_its_password() -> None:
    with pytest.raises(ServiceError, match="REMAT_DATABASE_URL") as refused:
        Database("nosuch://ann:secret@host/name")
    assert "secret" not in str(refused.value)


def test_an_unreachable_store_is_named_without_its_password(tmp_path: Path) -> None:
    nobody = f"postgresql://ann:secret@/name?host={tmp_path}"
    for url in (nobody, f"sqlite:///{tmp_path}"):
        database = Database(url)
        with pytest.raises(ServiceError, match="does not respond") as refused:
            database.migrate()
        assert "secret" not in str(refused.value)
        database.close()


def test_a_database_without_an_encoding_stores_text(postgres_url: str) -> None:
    """`createdb` makes such a database in the locale "C"."""
    without = "TEMPLATE template0 ENCODING SQL_ASCII LC_COLLATE 'C' LC_CTYPE 'C'"
    with postgres.fresh_database(postgres_url, without) as url:
        database = Database(url)
        database.migrate()
        with database.write() as connection:
            keys.add(connection, "Jürgen")
        with database.read() as connection:
            assert [key.name for key in keys.list_keys(connection)] == ["Jürgen"]
        database.close()


# -- users ------------------------------------------------------------------------------------


def test_a_cancelled_job_has_no_holder(database: Database) -> None:
    queued, running = submitted(database, content="q"), submitted(database, content="r")
    with database.write() as connection:
        assert jobs.cancel_or_delete(connection, "bob", queued) is None, "it is another user's job"
        assert jobs.cancel_or_delete(connection, "ann", queued) == "cancelled"
    assert claimed(database, "w").id == running
    with database.write() as connection:
        assert jobs.cancel_or_delete(connection, "ann", running) == "cancelled"
    with database.read() as connection:
        assert leases.owned_jobs(connection, "w", [running]) == set()
    assert not finish(database, "w", running)
    report(database, "w", running)
    with database.write() as connection:
        leases.release(connection, "w", [running])
    assert claim(database, "w") is None
    assert status(database, running) == "cancelled"
    assert kinds(database, running)[-2:] == ["status", "done"]


def test_an_ended_job_is_deleted_with_its_events(database: Database) -> None:
    id = submitted(database)
    with database.write() as connection:
        jobs.cancel_or_delete(connection, "ann", id)
        assert jobs.cancel_or_delete(connection, "ann", id) == "deleted"
        assert jobs.cancel_or_delete(connection, "ann", id) is None
    assert numbers(database, id) == []


def test_users_see_their_own_jobs_only(database: Database) -> None:
    id = submitted(database)
    with database.read() as connection:
        assert jobs.view(connection, "ann", id) is not None
        assert jobs.view(connection, "bob", id) is None
        assert jobs.result(connection, "bob", id) is None
        assert jobs.list_views(connection, "bob", None, None, 10) == ([], None)
        assert jobs.active_count(connection, "ann") == 1
        assert jobs.active_count(connection, "bob") == 0


def test_unknown_ids_are_of_no_job(database: Database) -> None:
    with database.write() as connection:
        for id in ("", "nothing", "nul\0", "ü'\"; --", "x" * 64):
            assert jobs.view(connection, "ann", id) is None
            assert jobs.cancel_or_delete(connection, "ann", id) is None


def test_pages_have_no_gap_and_no_overlap(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(7)]
    seen: list[str] = []
    before = None
    while True:
        with database.read() as connection:
            page, before = jobs.list_views(connection, "ann", "queued", before, 3)
        seen += [job.id for job in page]
        if before is None:
            break
    assert seen == ids[::-1]


def test_pages_of_a_state_list_only_that_state(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(5)]
    with database.write() as connection:
        for id in ids[::2]:
            jobs.cancel_or_delete(connection, "ann", id)
    with database.read() as connection:
        page, before = jobs.list_views(connection, "ann", "cancelled", None, 2)
        rest, end = jobs.list_views(connection, "ann", "cancelled", before, 2)
        assert [job.id for job in (*page, *rest)] == ids[::-2]
        assert end is None
        queued, _ = jobs.list_views(connection, "ann", "queued", None, 9)
        assert [job.id for job in queued] == ids[3::-2]
        assert jobs.list_views(connection, "ann", "failed", None, 9) == ([], None)


def test_the_position_is_the_number_of_jobs_before(database: Database) -> None:
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

    created_ids = [id for id in at_once(ask, 4) if id is not None]
    assert len(created_ids) == 1
    with database.read() as connection:
        assert jobs.by_idempotency_key(connection, "ann", "once", "c") == created_ids[0]
        assert jobs.by_idempotency_key(connection, "ann", "twice", "c") is None
        assert jobs.by_idempotency_key(connection, "bob", "once", "c") is None
        with pytest.raises(IdempotencyConflict):
            jobs.by_idempotency_key(connection, "ann", "once", "other")
        assert upkeep.job_counts(connection) == {"queued": 1}
        assert tallies.read(connection)["submitted"] == {(("kind", "solve"),): 1.0}
    with database.write() as connection:
        jobs.submit(connection, new("c", owner="bob", idempotency_key="once"))


def test_a_solved_request_is_answered_at_once(database: Database) -> None:
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


def test_jobs_that_ended_long_ago_are_deleted(database: Database) -> None:
    ended, live = submitted(database, content="old"), submitted(database, content="new")
    claimed(database, "w")
    finish(database, "w", ended)
    with database.write() as connection:
        leases.register_worker(connection, "w", (), 1)
        assert upkeep.delete_expired(connection, 60.0) == 0
    age(database, 120.0)
    with database.write() as connection:
        assert upkeep.delete_expired(connection, 60.0) == 1
    with database.read() as connection:
        assert jobs.view(connection, "ann", ended) is None
        assert jobs.view(connection, "ann", live) is not None
        assert not jobs.is_answered(connection, "old")
        assert events.events_after(connection, ended, 0) == []


def test_an_answer_in_use_is_kept(database: Database) -> None:
    first = submitted(database)
    claimed(database, "w")
    finish(database, "w", first)
    age(database, 120.0)
    second = submitted(database)
    with database.write() as connection:
        assert upkeep.delete_expired(connection, 60.0) == 1
    with database.read() as connection:
        assert answer(connection, second) == b"body"


def test_an_answer_that_a_later_job_uses_is_kept(database: Database) -> None:
    """The later job made the same request and waited for the answer."""
    first, second = submitted(database), submitted(database)
    claimed(database, "w")
    finish(database, "w", first)
    age(database, 120.0)
    assert claim(database, "w") is None
    assert status(database, second) == "succeeded"
    with database.write() as connection:
        assert upkeep.delete_expired(connection, 60.0) == 1
    with database.read() as connection:
        assert answer(connection, second) == b"body"
        assert viewed(connection, second).summary != ()


def test_answers_that_are_not_shared_belong_to_one_job(database: Database) -> None:
    first, second = (submitted(database, idempotency_key=key) for key in ("a", "b"))
    claimed(database, "w")
    finish(database, "w", first, body=b"of the first", is_shared=False)
    assert claimed(database, "w").id == second, "it does not get the answer of the first job"
    finish(database, "w", second, body=b"shared")
    third = submitted(database)
    with database.read() as connection:
        bodies = [answer(connection, id) for id in (first, second, third)]
        assert bodies == [b"of the first", b"shared", b"shared"]
        assert jobs.by_idempotency_key(connection, "ann", "a", "content") == first
        with pytest.raises(IdempotencyConflict):
            jobs.by_idempotency_key(connection, "ann", "a", "other")
    assert claim(database, "w") is None


# -- events -----------------------------------------------------------------------------------


def test_events_are_numbered_without_gaps(database: Database) -> None:
    ids = [submitted(database, content=f"c{i}") for i in range(3)]
    for _ in ids:
        claimed(database, "w")

    def append_event(number: int) -> None:
        for step in range(8):
            report(database, "w", ids[(number + step) % len(ids)])

    at_once(append_event, 3)
    for id in ids:
        assert finish(database, "w", id)
        event_numbers = numbers(database, id)
        assert event_numbers == list(range(1, len(event_numbers) + 1))
        assert len(event_numbers) == 2 + 8 + 2
        assert numbers(database, id, after=4) == event_numbers[4:]


# -- tallies ----------------------------------------------------------------------------------


def test_counters_add_up(database: Database) -> None:
    def add(number: int) -> None:
        for step in range(10):
            with database.write() as connection:
                tallies.count(connection, "finished", kind="solve", status="succeeded")
                tallies.observe(connection, "solve_seconds", float(number + step), tallies.SECONDS)

    at_once(add, 4)
    with database.read() as connection:
        counts = tallies.read(connection)
    assert counts["finished"] == {(("kind", "solve"), ("status", "succeeded")): 40.0}
    assert sum(counts["solve_seconds_bucket"].values()) == 40
    assert counts["solve_seconds_bucket"][(("le", "0.1"),)] == 1
    total = sum(number + step for number in range(4) for step in range(10))
    assert counts["solve_seconds_sum"] == {(): float(total)}


def test_the_last_bucket_has_no_bound(database: Database) -> None:
    with database.write() as connection:
        tallies.observe(connection, "gap", 0.0, tallies.GAPS)
        tallies.observe(connection, "gap", 7.0, tallies.GAPS)
    with database.read() as connection:
        counts = tallies.read(connection)["gap_bucket"]
    assert counts == {(("le", "0.0"),): 1.0, (("le", "+Inf"),): 1.0}


# -- keys -------------------------------------------------------------------------------------


def test_keys_are_created_listed_and_revoked(database: Database) -> None:
    def owner(key: str) -> str | None:
        with database.read() as connection:
            return keys.owner_of(connection, key)

    with database.write() as connection:
        assert not keys.any_exist(connection)
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
        assert [listed_key.name for listed_key in keys.list_keys(connection)] == [
            ("ann" * 100)[:200],
            "bob",
        ]
    assert secret not in str(stored)
    with database.write() as connection:
        assert keys.revoke(connection, id)
        assert not keys.revoke(connection, id), "already"
        assert not keys.revoke(connection, "nothing")
    assert owner(key) is None
    assert owner(other_key) == other
    with database.read() as connection:
        assert keys.any_exist(connection), "a service that had keys does not open again"


# -- helpers ----------------------------------------------------------------------------------


def tables(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(sa.inspect(connection).get_table_names())


def revision(database: Database) -> str | None:
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()
