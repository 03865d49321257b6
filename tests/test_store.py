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
from tests import postgres
from tests.stores import (
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


def test_many_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Where two turn a new file to WAL in the same moment, SQLite tells one that it is locked."""

    def open_(database: Database) -> None:
        with database.write() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS found (x)")

    for number in range(100):
        few = [Database(f"sqlite:///{tmp_path}/{number}.sqlite") for _ in range(4)]
        at_once(lambda i, few=few: open_(few[i]), len(few))
        for database in few:
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


def tables(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(sa.inspect(connection).get_table_names())


def revision(database: Database) -> str | None:
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()
