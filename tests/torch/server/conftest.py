"""A server for the tests of a file, with the settings in its variable `SETTINGS`, if there are
any."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    settings = getattr(request.module, "SETTINGS", {})
    with servers.running(tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with server.http() as client:
        yield client
