"""Access to the service: API keys, the owner of a request's jobs, and request rates."""

from __future__ import annotations

import time

from fastapi import Request
from limits import RateLimitItemPerMinute, storage, strategies

from remat_server.problems import ServiceProblem
from remat_server.settings import Settings
from remat_server.store import keys
from remat_server.store.database import Database

ANONYMOUS = ""
"""The owner of all jobs while there are no API keys."""


class AccessControl:
    """Checks API keys and request rates. Looks for the first key at most once a second."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._limiter = strategies.SlidingWindowCounterRateLimiter(storage.MemoryStorage())
        self._rate = RateLimitItemPerMinute(settings.requests_per_minute)
        self._requires_key = False
        self._checked_at_s = float("-inf")

    @property
    def requires_key(self) -> bool:
        """True if requests need an API key: from the first key on, even if it is revoked."""
        if not self._requires_key and time.monotonic() > self._checked_at_s + 1.0:
            with self._database.read() as connection:
                self._requires_key = keys.any_exist(connection)
            self._checked_at_s = time.monotonic()
        return self._requires_key

    def owner(self, request: Request) -> str:
        """Return the owner of a request's jobs. Raises `ServiceProblem` 401 or 429."""
        address = request.client.host if request.client else ""
        key = _key(request)
        owner: str | None = ANONYMOUS
        if self.requires_key:
            owner = self._owner_of(key)
        # Requests with a wrong key count for their address, which limits guessing.
        if not self._limiter.hit(self._rate, owner or address):
            raise ServiceProblem(
                429,
                f"more than {self._rate.amount} requests in a minute; wait, or watch a job by its "
                "event stream instead of polling",
                headers={"Retry-After": "10"},
            )
        if owner is None:
            raise _unauthorized(key)
        return owner

    def _owner_of(self, key: str) -> str | None:
        if not key:
            return None
        with self._database.read() as connection:
            return keys.owner_of(connection, key)


def _key(request: Request) -> str:
    """Return the API key in the request's `Authorization` header; "" if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _unauthorized(key: str) -> ServiceProblem:
    if key:
        text, challenge = "this API key is unknown or was revoked", 'error="invalid_token"'
    else:
        text, challenge = "this service needs an API key, as `Authorization: Bearer remat_...`", ""
    return ServiceProblem(
        401,
        f"{text}; the operator creates one with `remat keys add NAME`",
        headers={"WWW-Authenticate": f"Bearer {challenge}".strip()},
    )
