"""Settings of the service, from the environment variables `REMAT_*`. Each has a usable default."""

from __future__ import annotations

import os
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from remat.limits.budget import Budget

Bytes = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


def _data_dir() -> Path:
    if home := os.environ.get("XDG_DATA_HOME"):
        return Path(home) / "remat"
    try:
        return Path.home() / ".local" / "share" / "remat"
    except RuntimeError:  # a container's user without a name and without HOME
        return Path("/var/lib/remat")


class Settings(BaseSettings):
    """All settings. Sizes may be written as "8GiB"; list items are separated by commas."""

    model_config = SettingsConfigDict(
        env_prefix="REMAT_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allow_anonymous: bool = False
    """Serve other machines without API keys."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names that requests may use in addition to localhost; `*` allows all. By default, a
    service on a public address allows all if it needs keys, else IP addresses and names without
    a dot."""
    data_dir: Path = Field(default_factory=_data_dir)
    database_url: str = ""
    """Database URL of SQLAlchemy; by default SQLite in `data_dir`."""
    worker: bool = True
    """Start a worker with the service. If false, run `remat worker` elsewhere."""
    concurrent_solves: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=1024)
    threads_per_solve: int = Field(default=2, ge=1, le=256)
    solvers: Annotated[tuple[str, ...], NoDecode] = ("HiGHS",)
    solve_memory_bytes: Bytes = 8 << 30
    solve_limit_s: Seconds = 3600.0
    """Longest time limit that a request may set."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Niceness of solving processes, so that the service responds while they run."""
    placement: Literal["local", "ray"] = "local"
    ray_address: str = ""
    body_bytes: Bytes = 64 << 20
    """Limit of a request body, after decompression."""
    operations: int = Field(default=50_000, ge=1)
    values: int = Field(default=200_000, ge=1)
    queued_per_key: int = Field(default=1000, ge=1)
    requests_per_minute: int = Field(default=6000, ge=1)
    wait_s: Seconds = 60.0
    """Longest time that `Prefer: wait` waits."""
    lease_s: Seconds = 15.0
    """Time without a heartbeat after which a worker loses its jobs."""
    attempts: int = Field(default=25, ge=1)
    """Number of lost workers after which a job fails."""
    drain_s: Seconds = 30.0
    """Time that running solves may continue after SIGTERM."""
    retention_s: Seconds = 7 * 86400.0
    """Time after which finished jobs and unused answers are deleted."""
    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Operator namespaces that traces may use in addition to aten and prims."""
    log_format: Literal["json", "text"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("allowed_hosts", "solvers", "namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("solve_memory_bytes", "body_bytes", mode="before")
    @classmethod
    def _parse_size(cls, value: object) -> object:
        return (Budget.parse(value).size_bytes or value) if isinstance(value, str) else value

    @cached_property
    def store_url(self) -> str:
        """Database URL of the job store."""
        return self.database_url or f"sqlite:///{self.data_dir / 'jobs.sqlite'}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give another process the same settings."""
        variables = {}
        for name, value in self.model_dump(mode="json").items():
            text = ",".join(value) if isinstance(value, list) else str(value)
            variables[f"REMAT_{name.upper()}"] = text
        return variables
