"""The commands `remat serve`, `remat worker` and `remat keys`.

They import the service when they run, so that `remat --help` is fast.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from remat.errors import ServiceError
from remat_server.settings import Settings

if TYPE_CHECKING:
    from remat_server.store.database import Database

keys_app = typer.Typer(help="API keys of the service.", no_args_is_help=True)

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="URL of the job store, e.g. postgresql://user@host/name; by default SQLite",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the service's commands to `remat`."""
    app.command(epilog=_settings_help())(serve)
    app.command()(worker)
    app.add_typer(keys_app, name="keys")


def serve(
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on; 0 selects a free one")
    ] = None,
    database_url: DatabaseUrl = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Concurrent solves; 0 to solve only elsewhere (remat worker)"
        ),
    ] = None,
) -> None:
    """Start the service: the API, the web page at /, and a worker.

    Settings come from the environment variables REMAT_*; options override them.
    """
    import uvicorn

    from remat_server.http.app import check_keys, create_app
    from remat_server.http.state import app_state

    settings = _settings(
        host=host,
        port=port,
        database_url=database_url,
        worker=None if workers is None else workers > 0,
        concurrent_solves=workers or None,
    )
    app = create_app(settings)
    # Reports errors of the store in one line; uvicorn would print a traceback.
    app_state(app).database.migrate()
    check_keys(app)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,
    )
    server = uvicorn.Server(config)
    server.run()
    if not server.started:
        raise typer.Exit(1)


def worker(
    database_url: DatabaseUrl = None,
    concurrent_solves: Annotated[
        int | None, typer.Option(metavar="N", help="Number of concurrent solves")
    ] = None,
) -> None:
    """Solve the jobs of a store, here or on a Ray cluster.

    REMAT_PLACEMENT=ray selects the cluster. Any number of workers can share one PostgreSQL store.
    """
    from remat_server.work.processes import run_worker

    run_worker(_settings(database_url=database_url, concurrent_solves=concurrent_solves))


@keys_app.command("add")
def add_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Owner or purpose of the key")],
    database_url: DatabaseUrl = None,
) -> None:
    """Create an API key and print it, once.

    From the first key on, all requests need one.
    """
    from rich.console import Console

    from remat_server.store import keys

    with _open_store(database_url) as database, database.write() as connection:
        id, key = keys.add(connection, name)
    message = f"key {id} for {name!r}; it is shown only this time:"
    Console(stderr=True).print(message, markup=False)
    print(key)


@keys_app.command("list")
def list_keys(database_url: DatabaseUrl = None) -> None:
    """List ids and names of the API keys.

    The keys themselves are not stored.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from remat_server.store import keys

    table = Table("id", "name", "created", "revoked")
    with _open_store(database_url) as database, database.read() as connection:
        for key in keys.list_keys(connection):
            table.add_row(
                key.id, escape(key.name), _format_time(key.created_at), _format_time(key.revoked_at)
            )
    Console().print(table)


@keys_app.command("revoke")
def revoke_key(
    id: Annotated[str, typer.Argument(metavar="ID", help="The id that `remat keys list` shows")],
    database_url: DatabaseUrl = None,
) -> None:
    """Revoke an API key immediately."""
    from remat_server.store import keys

    with _open_store(database_url) as database, database.write() as connection:
        if not keys.revoke(connection, id):
            raise ServiceError(f"there is no active key {id!r}; `remat keys list` shows all keys")


@contextmanager
def _open_store(database_url: str | None) -> Iterator[Database]:
    from remat_server.store.database import Database

    database = Database(_settings(database_url=database_url).store_url)
    database.migrate()
    try:
        yield database
    finally:
        database.close()


def _settings(**options: Any) -> Settings:
    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = "REMAT_" + "_".join(str(part) for part in first["loc"]).upper()
        raise ServiceError(f"{name}: {first['msg']} (got {first['input']!r})") from None


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _settings_help() -> str:
    lines = ["Settings (environment, with defaults):", ""]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = ",".join(default) if isinstance(default, tuple) else str(default)
        text = f" - {field.description}" if field.description else ""
        lines.append(f"REMAT_{name.upper()}={shown}{text}\n")
    return "\n".join(lines)
