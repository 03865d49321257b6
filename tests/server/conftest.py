"""Stores for the tests of the service, on SQLite and on PostgreSQL."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.helpers.service import postgres

from remat_server.store.database import Database


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a real PostgreSQL, one for each test process, started at its first use."""
    if reason := postgres.why_unavailable():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="remat-postgres-") as directory:
        Path(directory).chmod(0o755)
        with postgres.running(Path(directory)) as url:
            yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store, on SQLite and on PostgreSQL."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield f"sqlite:///{tmp_path / 'jobs.sqlite'}"
        else:
            server = request.getfixturevalue("postgres_url")
            yield stack.enter_context(postgres.fresh_database(server))


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A store with its tables."""
    database = Database(url)
    database.migrate()
    yield database
    database.close()
