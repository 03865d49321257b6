"""Settings of the service: `REMAT_*` in the environment, each with a default that works."""

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
    except RuntimeError:  # a container's user that has no name, and no HOME
        return Path("/var/lib/remat")


class Settings(BaseSettings):
    """Everything that can be set. Sizes may be written as "8GiB", lists with commas."""

    model_config = SettingsConfigDict(
        env_prefix="REMAT_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allow_anonymous: bool = False
    """Serve other machines without API keys."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names that requests may name, besides localhost, or `*`. By default, on other addresses,
    any where keys are needed, and addresses and names without a dot where they are not."""
    data_dir: Path = Field(default_factory=_data_dir)
    database_url: str = ""
    """SQLAlchemy's form; by default SQLite in `data_dir`."""
    worker: bool = True
    """Solve in this service too; without, `remat worker` must run elsewhere."""
    concurrent_solves: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=1024)
    threads_per_solve: int = Field(default=2, ge=1, le=256)
    solvers: Annotated[tuple[str, ...], NoDecode] = ("HiGHS",)
    solve_memory_bytes: Bytes = 8 << 30
    solve_limit_s: Seconds = 3600.0
    """The longest time limit that a request may ask for."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Of solves, so that the service answers while they run."""
    placement: Literal["local", "ray"] = "local"
    ray_address: str = ""
    body_bytes: Bytes = 64 << 20
    """Of a request, after decompression."""
    operations: int = Field(default=50_000, ge=1)
    values: int = Field(default=200_000, ge=1)
    queued_per_key: int = Field(default=1000, ge=1)
    requests_per_minute: int = Field(default=6000, ge=1)
    wait_s: Seconds = 60.0
    """The longest that `Prefer: wait` waits."""
    lease_s: Seconds = 15.0
    """After how long without a heartbeat a job is taken from its worker."""
    attempts: int = Field(default=25, ge=1)
    """How often a job may lose its worker before it fails."""
    drain_s: Seconds = 30.0
    """How long running solves may go on after SIGTERM."""
    retention_s: Seconds = 7 * 86400.0
    """How long finished jobs and unused plans are kept."""
    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Operator namespaces that traces may name, besides aten and prims."""
    log_format: Literal["json", "text"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("allowed_hosts", "solvers", "namespaces", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        if isinstance(given, str):
            return tuple(part.strip() for part in given.split(",") if part.strip())
        return given

    @field_validator("solve_memory_bytes", "body_bytes", mode="before")
    @classmethod
    def _size(cls, given: object) -> object:
        return (Budget.parse(given).size_bytes or given) if isinstance(given, str) else given

    @cached_property
    def store_url(self) -> str:
        """Where the jobs are."""
        return self.database_url or f"sqlite:///{self.data_dir / 'jobs.sqlite'}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def environment(self) -> dict[str, str]:
        """The variables that give another process the same settings."""
        found = {}
        for name, value in self.model_dump(mode="json").items():
            text = ",".join(value) if isinstance(value, list) else str(value)
            found[f"REMAT_{name.upper()}"] = text
        return found
