"""The parts of the application that request handlers share, and how handlers get them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from prometheus_client import Histogram

from remat_server.http.auth import AccessControl
from remat_server.http.bodies import BodyReader
from remat_server.http.intake import RequestIntake
from remat_server.settings import Settings
from remat_server.store.database import Database


@dataclass(frozen=True)
class AppState:
    """Parts of one application, created with it. They are shared by all requests."""

    settings: Settings
    database: Database
    access: AccessControl
    intake: RequestIntake
    bodies: BodyReader
    request_histogram: Histogram
    draining: threading.Event = field(default_factory=threading.Event)
    """Set once the service is shutting down: no new jobs, and event streams end."""
    routes: list[Any] = field(default_factory=list)
    """Routes of the API, to find the methods that a path supports."""


def app_state(app: FastAPI) -> AppState:
    """Return the state that `create_app` stored in the application."""
    return app.state.app_state


def request_state(request: Request) -> AppState:
    """Return the state of the application that handles the request."""
    return app_state(request.app)


def _owner(request: Request) -> str:
    return request_state(request).access.owner(request)


def _database(request: Request) -> Database:
    return request_state(request).database


Owner = Annotated[str, Depends(_owner)]
"""Parameter of a route: the owner of the request's jobs. The request needs a valid key if there are
keys."""

Store = Annotated[Database, Depends(_database)]
"""Parameter of a route: the job store."""
