"""Connections to the job store, and transactions that can run concurrently."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Double, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from remat.errors import ServiceError

_BUSY_TIMEOUT_S = 30
_RETRY_INTERVAL_S = 0.01


class now(FunctionElement[float]):  # reads as the SQL function it is
    """SQL function: seconds since 1970 by the database's clock, which all machines share."""

    type = Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite_now(element: now, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql_now(element: now, compiler: Any, **options: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


def upsert_into(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT statement that supports ON CONFLICT."""
    is_postgresql = connection.dialect.name == "postgresql"
    return postgresql.insert(table) if is_postgresql else sqlite.insert(table)


class Database:
    """The job store. `read()` and `write()` provide connections; `write()` commits at its end.

    With SQLite, `write()` acquires the write lock when its transaction begins. Otherwise a
    transaction that reads and then writes would fail if another one wrote in between.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self.is_sqlite = parsed.get_backend_name() == "sqlite"
            if self.is_sqlite and parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            options: dict[str, Any] = {"pool_pre_ping": True}
            if self.is_sqlite:
                options["connect_args"] = {"timeout": _BUSY_TIMEOUT_S, "isolation_level": None}
            else:
                options |= {"pool_size": 10, "max_overflow": 40}
                # A database created in the locale "C" has no encoding, and would return bytes.
                options["connect_args"] = {"client_encoding": "utf8"}
            self._read_options = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
            self.url = parsed
            self.engine = create_engine(parsed, **options)
        except Exception as error:
            raise ServiceError(
                f"the store {_without_password(url)} cannot be opened: {error}; REMAT_DATABASE_URL "
                "must be of the form postgresql://user@host/name (pip install 'remat[postgres]')"
            ) from None
        if self.is_sqlite:
            event.listen(self.engine, "connect", _configure_sqlite)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Provide a connection for reading, which sees one consistent state of the store."""
        with self.engine.connect().execution_options(**self._read_options) as connection:
            if self.is_sqlite:
                connection.exec_driver_sql("BEGIN")
            yield connection
            connection.rollback()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Provide a connection for one transaction. An exception in the block rolls it back."""
        with self.engine.connect() as connection:
            if self.is_sqlite:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def migrate(self) -> None:
        """Migrate the tables to this version. Several processes may do so concurrently.

        Raises `ServiceError` if the store cannot be reached.
        """
        try:
            with self.write() as connection:
                self._migrate(connection)
        except OperationalError as error:
            shown = self.url.render_as_string(hide_password=True)
            raise ServiceError(f"the store {shown} does not respond: {error.orig}") from None

    def _migrate(self, connection: Connection) -> None:
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(7236748)"))
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _configure_sqlite(connection: Any, record: object) -> None:
    deadline_s = time.monotonic() + _BUSY_TIMEOUT_S
    # If several processes switch a new file to WAL concurrently, one succeeds, and the others get
    # "locked" immediately, whatever their timeout: they retry, and then the file is in WAL mode.
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_INTERVAL_S)
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _without_password(url: str) -> str:
    """Return the URL with a hidden password, for messages."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except Exception:
        return "in REMAT_DATABASE_URL"
