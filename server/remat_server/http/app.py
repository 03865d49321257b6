"""The FastAPI application: `uvicorn remat_server.http.app:app`, or `create_app(settings)`."""

from __future__ import annotations

import gc
import json
import re
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
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

import remat
from remat.costs.devices import DEVICES
from remat.costs.optimizer_memory import OPTIMIZERS
from remat.documents.names import NAMESPACE_PATTERN
from remat.errors import ServiceError
from remat.fitting.answer import GPUS
from remat.service.wire import (
    DryRunResult,
    FitRequest,
    FitResult,
    JobView,
    ProblemDetails,
    SolveRequest,
    SolveResult,
    SweepRequest,
    SweepResult,
    WhyResult,
)
from remat_server import logs
from remat_server.http import metrics, problem_responses
from remat_server.http.auth import AccessControl
from remat_server.http.bodies import BodyReader
from remat_server.http.intake import RequestIntake, allowed_namespaces
from remat_server.http.middleware import RequestMiddleware
from remat_server.http.routes import health, jobs, results, solve
from remat_server.http.state import AppState, app_state
from remat_server.settings import Settings
from remat_server.store.database import Database
from remat_server.work.processes import SupervisedWorker

log = structlog.get_logger()

_STATIC = Path(__file__).parent / "static"


def create_app(settings: Settings | None = None) -> FastAPI:
    """Create the application. Settings come from the environment by default."""
    settings = settings or Settings()
    logs.configure(settings)
    database = Database(settings.store_url)
    modules = (solve, jobs, results, health)
    state = AppState(
        settings,
        database,
        access=AccessControl(settings, database),
        intake=RequestIntake(settings, database),
        bodies=BodyReader(settings.body_bytes),
        request_histogram=metrics.request_histogram(),
        routes=[route for module in modules for route in module.router.routes],
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gc.set_threshold(100_000)  # documents are many small objects without cycles
        await run_sync(database.migrate)
        check_keys(app)
        _drain_on_signals(state.draining)
        worker = SupervisedWorker(settings) if settings.worker else None
        if worker is not None:
            await worker.start()
        log.info("service started", store="sqlite" if database.is_sqlite else "postgresql")
        yield
        state.draining.set()
        if worker is not None:
            await worker.stop()
        database.close()
        log.info("service stopped")

    app = FastAPI(
        title="remat",
        version=remat.__version__,
        summary="Optimal rematerialization for PyTorch",
        description="Post a traced model and a budget; get the schedule within the budget that has "
        "the least extra time, and the program that runs it.",
        lifespan=lifespan,
    )
    app.state.app_state = state
    problem_responses.install_exception_handlers(app)
    for module in modules:
        app.include_router(module.router)

    @app.get("/static/choices.js", include_in_schema=False)
    async def choices() -> Response:
        return Response(_choices(), media_type="text/javascript")

    app.mount("/static", StaticFiles(directory=_STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_STATIC / "index.html")

    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
    app.add_middleware(
        RequestMiddleware, settings=settings, request_histogram=state.request_histogram
    )
    _complete_openapi(app)
    return app


def _choices() -> str:
    """Return the JavaScript module with the names that the page's form offers."""
    names = {"DEVICES": [*DEVICES], "GPUS": GPUS, "OPTIMIZERS": OPTIMIZERS}
    return "".join(f"export const {name} = {json.dumps(items)};\n" for name, items in names.items())


def check_keys(app: FastAPI) -> None:
    """Raise `ServiceError` if other machines could use the service without an API key."""
    settings, access = app_state(app).settings, app_state(app).access
    if not settings.is_loopback and not settings.allow_anonymous and not access.requires_key:
        raise ServiceError(
            f"{settings.host} can be reached from other machines, but there are no API keys: "
            "create one (remat keys add NAME), or bind to 127.0.0.1, or set "
            "REMAT_ALLOW_ANONYMOUS=true if all who can reach it may use it"
        )


def _complete_openapi(app: FastAPI) -> None:
    """Add the schemas that only hand-written references use to the OpenAPI document."""
    generate = app.openapi
    settings = app_state(app).settings

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        for kind in (
            ProblemDetails,
            DryRunResult,
            JobView,
            SolveRequest,
            SweepRequest,
            FitRequest,
            SolveResult,
            SweepResult,
            FitResult,
            WhyResult,
        ):
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas.setdefault(kind.__name__, schema)
        for strategy in schemas["Options"]["properties"]["strategy"]["oneOf"]:
            options = strategy["properties"]
            if "time_limit" in options:
                limit_s = settings.solve_limit_s
                default_s = min(options["time_limit"]["default"], limit_s)
                options["time_limit"] |= {"maximum": limit_s, "default": default_s}
            if "solver" in options:
                options["solver"]["enum"] = sorted({"HiGHS", *settings.solvers})
        for choice in schemas["FitRequest"]["properties"]["time_limit"]["anyOf"]:
            if choice["type"] == "number":
                choice["maximum"] = settings.solve_limit_s
        words = "|".join(map(re.escape, sorted(allowed_namespaces(settings))))
        schemas["Target"]["pattern"] = schemas["Target"]["pattern"].replace(
            NAMESPACE_PATTERN, f"({words})"
        )
        # FastAPI describes events by a keyword of OpenAPI 3.2, which 3.1 forbids.
        event_responses = document["paths"]["/jobs/{id}/events"]["get"]["responses"]["200"]
        for media in event_responses["content"].values():
            media.setdefault("schema", media.pop("itemSchema", {}))
        key = {
            "type": "http",
            "scheme": "bearer",
            "description": "Needed if the service has API keys",
        }
        document["components"]["securitySchemes"] = {"key": key}
        document["security"] = [{}, {"key": []}]
        return document

    app.openapi = openapi


def _drain_on_signals(draining: threading.Event) -> None:
    """Set `draining` on SIGTERM and SIGINT, to end event streams: the server waits for them."""
    for shutdown_signal in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(shutdown_signal)

        def handler(signum: int, frame: Any, previous: Any = previous) -> None:
            draining.set()
            if callable(previous):
                previous(signum, frame)

        with suppress(ValueError):  # tests run the server outside of the main thread
            signal.signal(shutdown_signal, handler)


def __getattr__(name: str) -> FastAPI:
    """Create `app` on first access, so that importing this module has no side effects."""
    if name == "app":
        globals()["app"] = create_app()
        return globals()["app"]
    raise AttributeError(name)
