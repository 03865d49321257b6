"""A real PostgreSQL for tests, from the system's packages: own files, own socket, no port."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

_START_S = 30.0
_INITDB = ("--username=remat", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
_QUICK = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "200",
    "autovacuum": "off",
    "jit": "off",
}
"""Settings that give durability away for speed."""


def binaries() -> Path | None:
    """Return the folder of the newest PostgreSQL server on this machine, or None where there is
    none."""
    folders = sorted(
        (path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()),
        key=lambda path: int(path.parent.name),
    )
    if on_path := shutil.which("initdb"):
        folders.insert(0, Path(on_path).resolve().parent)
    usable = [
        path for path in folders if (path / "initdb").exists() and (path / "postgres").exists()
    ]
    return usable[-1] if usable else None


def why_unavailable() -> str:
    """Return the reason why no PostgreSQL can be started; empty where one can."""
    if binaries() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no other user to run it as"
    return ""


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run a server whose files are in `directory` during the block; yield its URL.

    The server refuses to run as root. So where the tests run as root the folder is given to
    another user, who must be able to reach it: only root can reach pytest's `tmp_path`.
    """
    binary_folder = binaries()
    assert binary_folder is not None, why_unavailable()
    run_as: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = _user()
        assert user is not None, why_unavailable()
        os.chown(directory, user.pw_uid, user.pw_gid)
        run_as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data, log = directory / "data", directory / "log"
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
    subprocess.run(
        [binary_folder / "initdb", f"--pgdata={data}", *_INITDB],
        check=True,
        capture_output=True,
        cwd=directory,
        env=environment,
        **run_as,
    )
    settings = {**_QUICK, "unix_socket_directories": str(directory)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [binary_folder / "postgres", "-D", data]
            + [part for name, value in settings.items() for part in ("-c", f"{name}={value}")],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=directory,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the tests, which then stop the server
            **run_as,
        )
    url = f"postgresql://remat@/postgres?host={quote(str(directory), safe='/')}"
    try:
        _wait_until_ready(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # "fast": connections are ended, files are in order
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)
            process.wait(timeout=20)


@contextmanager
def fresh_database(url: str, options: str = "") -> Iterator[str]:
    """Create an empty database of a server with `options` of `CREATE DATABASE`; yield its URL,
    and drop it at the end."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} {options}".encode())
        yield url.replace("@/postgres?", f"@/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@contextmanager
def unreachable(url: str, database_url: str) -> Iterator[None]:
    """Make a database of a server refuse all connections during the block."""
    name = database_url.partition("@/")[2].partition("?")[0]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(end, [name])
        try:
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.05)
    raise AssertionError(f"PostgreSQL does not start:\n{log.read_text()[-3000:]}")


def _user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):  # plain: a user of the system
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None
