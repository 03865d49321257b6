"""Who asks: an API key, or nobody in particular where no keys were made."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Depends, Request
from limits import RateLimitItemPerMinute, storage, strategies

from remat_server.problems import ServiceProblem
from remat_server.settings import Settings
from remat_server.store import keys
from remat_server.store.database import Database

ANONYMOUS = ""
"""The owner of all jobs where no keys were made."""


class Gate:
    """Checks keys and rates. Whether keys exist at all is asked anew each second."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._limiter = strategies.SlidingWindowCounterRateLimiter(storage.MemoryStorage())
        self._rate = RateLimitItemPerMinute(settings.requests_per_minute)
        self._is_closed = False
        self._asked_at = float("-inf")

    @property
    def is_closed(self) -> bool:
        """Whether requests need a key. Once one was made this stays so."""
        if not self._is_closed and time.monotonic() > self._asked_at + 1.0:
            with self._database.read() as connection:
                self._is_closed = keys.is_any(connection)
            self._asked_at = time.monotonic()
        return self._is_closed

    def owner(self, request: Request) -> str:
        """The owner for a request. Raises `ServiceProblem` 401 or 429."""
        address = request.client.host if request.client else ""
        key = _key(request)
        owner: str | None = ANONYMOUS
        if self.is_closed:
            owner = self._owner_of(key)
        # Wrong keys are counted by address too: nobody may try them without end.
        if not self._limiter.hit(self._rate, owner or address):
            raise ServiceProblem(
                429,
                f"more than {self._rate.amount} requests in a minute; wait, or watch a job by its "
                "event stream instead of asking again and again",
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
    """What the request brings as its key; empty where it brings none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _unauthorized(key: str) -> ServiceProblem:
    if key:
        text, challenge = "this API key is not known here, or was revoked", 'error="invalid_token"'
    else:
        text, challenge = "this service needs an API key, as `Authorization: Bearer remat_...`", ""
    return ServiceProblem(
        401,
        f"{text}; the operator makes one with `remat keys add NAME`",
        headers={"WWW-Authenticate": f"Bearer {challenge}".strip()},
    )


def _owner(request: Request) -> str:
    gate: Gate = request.app.state.gate
    return gate.owner(request)


Owner = Annotated[str, Depends(_owner)]
"""The owner of the request's jobs, for routes that need one."""
