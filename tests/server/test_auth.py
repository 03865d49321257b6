"""Access control and rate limits, asked of the gate itself. Over HTTP they are in `test_access`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from starlette.requests import Request

from remat_server.http import auth
from remat_server.http.auth import ANONYMOUS, AccessControl
from remat_server.problems import ServiceProblem
from remat_server.settings import Settings
from remat_server.store import keys
from remat_server.store.database import Database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    store = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    store.migrate()
    yield store
    store.close()


def test_the_existence_of_keys_is_queried_once_a_second(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(auth, "time", clock)
    gate = AccessControl(Settings(), database)
    assert gate.requires_key is False
    with database.write() as connection:
        keys.add(connection, "ann")
    clock.monotonic = lambda: 100.9
    assert gate.requires_key is False
    clock.monotonic = lambda: 101.1
    assert gate.requires_key is True


def test_once_keys_exist_access_stays_closed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is not queried any more, which would happen for every request."""
    _create_key(database)
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(auth, "time", clock)
    gate = AccessControl(Settings(), database)
    assert gate.requires_key
    with database.write() as connection:
        connection.execute(sa.text("DELETE FROM keys"))
    clock.monotonic = lambda: 1000.0
    assert gate.requires_key


def test_without_keys_all_users_are_anonymous(database: Database) -> None:
    gate = AccessControl(Settings(), database)
    assert gate.owner(_request()) == ANONYMOUS
    assert gate.owner(_request("Bearer remat_x_y")) == ANONYMOUS
    assert gate.owner(_request(address=None)) == ANONYMOUS, "as over a socket of this machine"


@pytest.mark.parametrize("scheme", ["Bearer {}", "bearer {}", "BEARER   {} "])
def test_a_key_identifies_its_owner(database: Database, scheme: str) -> None:
    id, key = _create_key(database)
    _, other = _create_key(database)
    gate = AccessControl(Settings(), database)
    assert gate.owner(_request(scheme.format(key))) == id
    assert gate.owner(_request(scheme.format(other))) != id


@pytest.mark.parametrize("scheme", ["", "Basic {}", "Digest {}", "Token {}", "{}", "Bearer{}"])
def test_other_authentication_schemes_carry_no_key(database: Database, scheme: str) -> None:
    _, key = _create_key(database)
    refused = _refused(AccessControl(Settings(), database), scheme.format(key))
    assert refused.status == 401
    assert refused.detail == (
        "this service needs an API key, as `Authorization: Bearer remat_...`; the operator creates "
        "one with `remat keys add NAME`"
    )
    assert refused.headers == {"WWW-Authenticate": "Bearer"}


def test_a_wrong_key_is_reported_as_such(database: Database) -> None:
    _, key = _create_key(database)
    refused = _refused(AccessControl(Settings(), database), f"Bearer {key}x")
    assert refused.status == 401
    assert refused.detail == (
        "this API key is unknown or was revoked; the operator creates one with "
        "`remat keys add NAME`"
    )
    assert refused.headers == {"WWW-Authenticate": 'Bearer error="invalid_token"'}


def test_rate_limits_are_per_address_without_keys(database: Database) -> None:
    gate = AccessControl(Settings(requests_per_minute=3), database)
    for address in ("192.0.2.1", "192.0.2.2"):
        passed, refused = _requests_until_refused(gate, address=address)
        assert 3 <= passed <= 6
        assert refused.status == 429
        assert refused.detail.startswith("more than 3 requests in a minute; wait")
        assert refused.headers == {"Retry-After": "10"}


def test_rate_limits_are_per_key_for_any_address(database: Database) -> None:
    (_, ann), (_, bob) = _create_key(database), _create_key(database)
    gate = AccessControl(Settings(requests_per_minute=3), database)
    for address, key in (("192.0.2.1", ann), ("192.0.2.2", bob)):
        assert 3 <= _requests_until_refused(gate, f"Bearer {key}", address)[0] <= 6
    for address in ("192.0.2.1", "192.0.2.3"):
        assert _requests_until_refused(gate, f"Bearer {ann}", address)[0] < 3


def test_wrong_keys_count_for_their_address(database: Database) -> None:
    _, key = _create_key(database)
    gate = AccessControl(Settings(requests_per_minute=3), database)
    assert _refused(gate, "Bearer remat_a_0").status == 401
    assert _requests_until_refused(gate, "Bearer remat_b_0")[1].status == 429
    assert gate.owner(_request(f"Bearer {key}")), "the right key has its own count"


def _create_key(database: Database) -> tuple[str, str]:
    """Create a key; return its id and the key."""
    with database.write() as connection:
        return keys.add(connection, "somebody")


def _request(authorization: str = "", address: str | None = "192.0.2.1") -> Request:
    headers = [(b"authorization", authorization.encode())] if authorization else []
    client = None if address is None else (address, 1234)
    return Request({"type": "http", "headers": headers, "client": client})


def _refused(gate: AccessControl, authorization: str) -> ServiceProblem:
    with pytest.raises(ServiceProblem) as refused:
        gate.owner(_request(authorization))
    return refused.value


def _requests_until_refused(
    gate: AccessControl, authorization: str = "", address: str = "192.0.2.1"
) -> tuple[int, ServiceProblem]:
    """Return how many requests of a minute pass, or a few more where a minute ends in between,
    and the error of the next."""
    for passed in range(7):
        try:
            gate.owner(_request(authorization, address))
        except ServiceProblem as problem:
            if problem.status != 401:
                return passed, problem
    raise AssertionError("seven requests were let through")
