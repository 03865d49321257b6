"""The application: `uvicorn remat_server.http.app:app`, or `create_app(settings)`."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import structlog
from anyio.to_thread import run_sync
from fastapi import FastAPI
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

import remat
from remat.errors import ServiceError
from remat.service.wire import (
    Answer,
    JobView,
    Problem,
    Sizes,
    SolveRequest,
    SweepAnswer,
    SweepRequest,
)
from remat_server import logs
from remat_server.http import metrics
from remat_server.http import problem_responses
from remat_server.http.auth import Gate
from remat_server.http.bodies import Bodies
from remat_server.http.intake import Intake
from remat_server.http.middleware import Surround
from remat_server.http.routes import health, jobs, results, solve
from remat_server.settings import Settings
from remat_server.store.database import Database
from remat_server.work.processes import KeptWorker

log = structlog.get_logger()

_STATIC = Path(__file__).parent / "static"


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service with its settings, from the environment by default."""
    settings = settings or Settings()
    logs.configure(settings)
    database = Database(settings.store_url)
    gate = Gate(settings, database)
    requests = metrics.request_histogram()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gc.set_threshold(100_000)  # documents are many small objects without cycles
        await run_sync(database.migrate)
        check_keys(app)
        _drain_on_signals(app.state.draining)
        worker = KeptWorker(settings) if settings.worker else None
        if worker is not None:
            await worker.start()
        log.info("service starts", store="sqlite" if database.is_sqlite else "postgresql")
        yield
        app.state.draining.set()
        if worker is not None:
            await worker.stop()
        database.close()
        log.info("service ends")

    app = FastAPI(
        title="remat",
        version=remat.__version__,
        summary="Optimal rematerialization for PyTorch",
        description="Post a traced model and a budget; get back the schedule that recomputes least "
        "within it, and the program that runs it.",
        lifespan=lifespan,
    )
    app.state.settings, app.state.database, app.state.gate = settings, database, gate
    app.state.intake = Intake(settings, database)
    app.state.bodies = Bodies(settings.body_bytes)
    app.state.requests = requests
    app.state.draining = threading.Event()
    problem_responses.install(app)
    modules = (solve, jobs, results, health)
    for module in modules:
        app.include_router(module.router)
    app.state.routes = [route for module in modules for route in module.router.routes]
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_STATIC / "index.html")

    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
    app.add_middleware(Surround, settings=settings, gate=gate, requests=requests)
    _document(app)
    return app


def check_keys(app: FastAPI) -> None:
    """Raises `ServiceError` where other machines could use the service without a key."""
    settings: Settings = app.state.settings
    gate: Gate = app.state.gate
    if not settings.is_loopback and not settings.allow_anonymous and not gate.is_closed:
        raise ServiceError(
            f"{settings.host} can be reached from other machines, and there are no API keys: "
            "make one (remat keys add NAME), or bind to 127.0.0.1, or set "
            "REMAT_ALLOW_ANONYMOUS=true if everybody who can reach it may use it"
        )


def _document(app: FastAPI) -> None:
    """Add to the OpenAPI document the schemas that only hand-written parts refer to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        for kind in (Problem, Sizes, JobView, SolveRequest, SweepRequest, Answer, SweepAnswer):
            made = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= made.pop("$defs", {})
            schemas.setdefault(kind.__name__, made)
        for strategy in schemas["Options"]["properties"]["strategy"]["oneOf"]:
            options = strategy["properties"]
            if "time_limit" in options:
                options["time_limit"]["maximum"] = app.state.settings.solve_limit_s
            if "solver" in options:
                options["solver"]["enum"] = sorted({"HiGHS", *app.state.settings.solvers})
        # FastAPI describes events by a word of OpenAPI 3.2, which 3.1 forbids.
        watching = document["paths"]["/jobs/{id}/events"]["get"]["responses"]["200"]
        for media in watching["content"].values():
            media.setdefault("schema", media.pop("itemSchema", {}))
        key = {"type": "http", "scheme": "bearer", "description": "Where the service has keys"}
        document["components"]["securitySchemes"] = {"key": key}
        document["security"] = [{}, {"key": []}]
        return document

    app.openapi = openapi


def _drain_on_signals(draining: threading.Event) -> None:
    """Tell event streams to end as soon as the server is told to: it waits for them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def handler(signum: int, frame: Any, before: Any = before) -> None:
            draining.set()
            if callable(before):
                before(signum, frame)

        with suppress(ValueError):  # not in the main thread: a test
            signal.signal(number, handler)


def __getattr__(name: str) -> FastAPI:
    """`app`, made when it is asked for: importing this module has no effects."""
    if name == "app":
        globals()["app"] = create_app()
        return globals()["app"]
    raise AttributeError(name)
