"""Measured costs on disk, so that later processes need not repeat the measurements.

One SQLite file in the user's cache directory, shared by concurrent processes (write-ahead log).
The cache is optional: where it cannot be read or written, the logger "remat" warns once, and the
process continues with its own measurements.

Costs measured while other processes used the cores are replaced once the machine is idle: they can
be a hundred times too high.
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

SCHEMA_VERSION = 5
FILE_NAME = f"costs-v{SCHEMA_VERSION}.sqlite"
BUSY_TIMEOUT_S = 2.0
BUSY_LOAD = 1.5
"""A cost that was measured with more processes per core is provisional."""
IDLE_LOAD = 1.0
"""With at most this many processes per core, provisional costs are measured once more."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS costs (
    hash TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    cost_s REAL NOT NULL CHECK (cost_s >= 0),
    workspace_bytes INTEGER NOT NULL CHECK (workspace_bytes >= 0),
    output_bytes TEXT NOT NULL,
    launch_s REAL NOT NULL CHECK (launch_s >= 0),
    load_per_core REAL NOT NULL,
    made_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID
"""
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """The measured time and memory of one run of an operation.

    `output_bytes` are the storage sizes of its results, in order: some kernels return tensors in
    larger storages than their fake kernels. On CUDA `cost_s` is the time on the device, and
    `launch_s` the time of the CPU to launch it; on the CPU `launch_s` is 0 and part of `cost_s`.
    """

    cost_s: float
    workspace_bytes: int
    output_bytes: tuple[int, ...] = ()
    launch_s: float = 0.0


def load_per_core() -> float:
    """Return how many processes per core ran or waited, on average over the last minute; 0 where
    the system does not count them."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


def default_cache_path() -> Path:
    """Return the absolute path of the cache file in `$REMAT_CACHE_DIR`, or else in the folder
    `remat` of the platform's cache directory."""
    if configured := os.environ.get("REMAT_CACHE_DIR"):
        return Path(configured).expanduser().absolute() / FILE_NAME
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "remat" / FILE_NAME


class CostCache:
    """Measured costs by key, in a file. Keys are any data that JSON can represent.

    Errors of the file are logged and never raised. Entries of this process are also in memory, so
    that nothing is lost where the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_cache_path() if path is None else Path(path).expanduser()
        self._memory: dict[str, MeasuredCost] = {}
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._disabled = False

    def get(self, key: object) -> MeasuredCost | None:
        """Return the cost under this key; None if there is none, if it was measured on a busy
        machine that is idle now, or if the file cannot be read."""
        hash_, _ = _key_hash_and_text(key)
        if hash_ in self._memory:
            return self._memory[hash_]
        row = self._with_file(
            lambda db: db.execute(
                "SELECT cost_s, workspace_bytes, output_bytes, launch_s, load_per_core FROM costs "
                "WHERE hash = ?",
                (hash_,),
            ).fetchone()
        )
        if row is None or (row[4] > BUSY_LOAD and load_per_core() <= IDLE_LOAD):
            return None
        sizes = tuple(int(size) for size in row[2].split())
        cost = self._memory[hash_] = MeasuredCost(float(row[0]), int(row[1]), sizes, float(row[3]))
        return cost

    def put(self, key: object, cost: MeasuredCost) -> None:
        """Store a cost; if two processes measure the same operation, the later result stays."""
        hash_, text = _key_hash_and_text(key)
        self._memory[hash_] = cost
        sizes = " ".join(map(str, cost.output_bytes))
        amounts = (cost.cost_s, cost.workspace_bytes, sizes, cost.launch_s)
        row = (hash_, text, *amounts, load_per_core())
        self._with_file(
            lambda db: db.execute(
                "INSERT OR REPLACE INTO costs "
                "(hash, key, cost_s, workspace_bytes, output_bytes, launch_s, load_per_core) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a later `get` or `put` reopens it."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        """Close the file; the caller holds the lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _with_file(self, query: Callable[[sqlite3.Connection], _T]) -> _T | None:
        """Return the result of a query; None if the file cannot be used. A corrupt file is replaced
        by a new one."""
        with self._lock:
            if self._disabled:
                return None
            try:
                try:
                    return query(self._open())
                except sqlite3.DatabaseError as error:
                    if not _is_corrupt_file_error(error):
                        raise
                    self._move_corrupt_file(error)
                    return query(self._open())
            except (sqlite3.Error, OSError) as error:
                self._disable(error)
                return None

    def _open(self) -> sqlite3.Connection:
        """Return the connection to the file, which is created if it does not exist."""
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            # Assigned first, so that `close` works whatever fails below. A cache that is dropped
            # without `close` leaves no open connection: Python 3.13 warns of those.
            self._connection = connection
            weakref.finalize(self, connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
        return self._connection

    def _move_corrupt_file(self, error: sqlite3.Error) -> None:
        """Rename a corrupt file, so that the user can inspect it and a new one can be created."""
        self._close()
        corrupt = self.path.with_name(self.path.name + ".corrupt")
        self.path.replace(corrupt)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        log.info(
            "the cost cache %s is damaged (%s): moved to %s; a new one is created",
            self.path,
            str(error),  # a log handler may keep the record: an error has the frames of its callers
            corrupt.name,
        )

    def _disable(self, error: Exception) -> None:
        """Stop using the file in this object, and warn of it."""
        self._disabled = True
        try:
            self._close()
        except sqlite3.Error:
            self._connection = None
        log.warning(
            "cannot use the cost cache %s (%s): continuing without it, the next process repeats "
            "the measurements; set REMAT_CACHE_DIR to a writable directory",
            self.path,
            str(error),
        )


def _is_corrupt_file_error(error: sqlite3.DatabaseError) -> bool:
    """True if an error says that the file is damaged or no database."""
    # The low byte is the primary error code; extended codes have it in common.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _CORRUPT


def _key_hash_and_text(key: object) -> tuple[str, str]:
    """Return the SHA-256 hash of a key, and its canonical JSON text."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest(), text
