"""A server with the default settings, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from tests.helpers.service import server as servers
from tests.helpers.service.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.running(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with server.http() as client:
        yield client
