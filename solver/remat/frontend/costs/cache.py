"""Measured costs on disk, so that the next run does not measure again.

One SQLite file in the user's cache directory, shared by concurrent processes (write-ahead log).
The cache is a convenience: where it cannot be read or written it says so once, by a warning of the
logger "remat", and the run goes on with what it measured itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

log = logging.getLogger("remat")

SCHEMA_VERSION = 4
FILE_NAME = f"costs-v{SCHEMA_VERSION}.sqlite"
BUSY_TIMEOUT_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS costs (
    hash TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    cost_s REAL NOT NULL CHECK (cost_s >= 0),
    workspace_bytes INTEGER NOT NULL CHECK (workspace_bytes >= 0),
    output_bytes TEXT NOT NULL,
    launch_s REAL NOT NULL CHECK (launch_s >= 0),
    made_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID
"""
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Cost:
    """What running an operation once takes. `output_bytes` are the storages of what it returns, in
    order: some kernels return tensors in larger storages than their fakes say. On CUDA `cost_s` is
    the device's time, and `launch_s` what the CPU takes to launch it; on the CPU that is one."""

    cost_s: float
    workspace_bytes: int
    output_bytes: tuple[int, ...] = ()
    launch_s: float = 0.0


def default_cache_path() -> Path:
    """`$REMAT_CACHE_DIR`, else `remat` in the platform's directory for caches, plus the file."""
    if configured := os.environ.get("REMAT_CACHE_DIR"):
        return Path(configured) / FILE_NAME
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "remat" / FILE_NAME


class CostCache:
    """Costs by key (anything JSON can write). Never raises: see the module's docstring.

    Entries of this run are also held in memory, so that nothing is lost where the file cannot be
    written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_cache_path() if path is None else Path(path)
        self._memory: dict[str, Cost] = {}
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._disabled = False

    def get(self, key: object) -> Cost | None:
        """The cost under this key, if it is known."""
        hash_, _ = _address(key)
        if hash_ in self._memory:
            return self._memory[hash_]
        row = self._with_file(
            lambda db: db.execute(
                "SELECT cost_s, workspace_bytes, output_bytes, launch_s FROM costs WHERE hash = ?",
                (hash_,),
            ).fetchone()
        )
        if row is None:
            return None
        sizes = tuple(int(size) for size in row[2].split())
        cost = self._memory[hash_] = Cost(float(row[0]), int(row[1]), sizes, float(row[3]))
        return cost

    def put(self, key: object, cost: Cost) -> None:
        """Remember a cost; of two processes that measure the same, the later one wins."""
        hash_, text = _address(key)
        self._memory[hash_] = cost
        sizes = " ".join(map(str, cost.output_bytes))
        row = (hash_, text, cost.cost_s, cost.workspace_bytes, sizes, cost.launch_s)
        self._with_file(
            lambda db: db.execute(
                "INSERT OR REPLACE INTO costs "
                "(hash, key, cost_s, workspace_bytes, output_bytes, launch_s) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _with_file(self, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
        with self._lock:
            if self._disabled:
                return None
            try:
                try:
                    return work(self._open())
                except sqlite3.DatabaseError as error:
                    if not _is_corrupt(error):
                        raise
                    self._set_aside(error)
                    return work(self._open())
            except (sqlite3.Error, OSError) as error:
                self._disable(error)
                return None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            # Kept first: whatever fails below, the caller can close it. Who drops the cache without
            # that leaves nothing open: Python 3.13 warns of such connections.
            self._connection = connection
            weakref.finalize(self, connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
        return self._connection

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Keep the broken file for its owner to look at, and make room for a new one."""
        self._close()
        broken = self.path.with_name(self.path.name + ".corrupt")
        self.path.replace(broken)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        log.warning(
            "the cost cache %s is damaged (%s): moved to %s and started anew",
            self.path,
            error,
            broken.name,
        )

    def _disable(self, error: Exception) -> None:
        self._disabled = True
        try:
            self._close()
        except sqlite3.Error:
            self._connection = None
        log.warning(
            "cannot use the cost cache %s (%s): going on without it, operations are measured again "
            "in the next run; set REMAT_CACHE_DIR to a writable directory",
            self.path,
            error,
        )


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    # The low byte is the primary code; extended codes sit above it.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _CORRUPT


def _address(key: object) -> tuple[str, str]:
    """Hash and canonical text of a key."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest(), text
