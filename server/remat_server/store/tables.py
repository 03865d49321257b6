"""The tables. Their history is in `migrations/`; times are seconds since 1970, by the database."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

metadata = MetaData()

keys = Table(
    "keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)
"""API keys: the digest of the secret, never the secret."""

answers = Table(
    "answers",
    metadata,
    Column("content", String(64), primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("summary", JSON, nullable=False),
    Column("used_at", Double, nullable=False, index=True),
)
"""What was solved, by the digest of what was asked. Shared by all jobs that ask the same."""

jobs = Table(
    "jobs",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("owner", String(32), nullable=False),
    Column("kind", String(10), nullable=False),
    Column("status", String(12), nullable=False),
    Column("model", String(500), nullable=False),
    Column("content", String(64), nullable=False, index=True),
    Column("needs", String(20), nullable=False),
    Column("request", LargeBinary),
    Column("idempotency_key", String(200)),
    Column("request_id", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double, index=True),
    Column("attempts", Integer, nullable=False, default=0),
    Column("worker", String(100)),
    Column("lease_until", Double),
    Column("cancelled", Boolean, nullable=False, default=False),
    Column("revision", Integer, nullable=False, default=0),
    Column("progress", JSON(none_as_null=True)),
    Column("problem", JSON(none_as_null=True)),
    UniqueConstraint("owner", "idempotency_key"),
    Index("jobs_by_status", "status", "number"),
    Index("jobs_by_owner", "owner", "number"),
)
"""`request` is gzipped JSON, dropped once the job has ended; `needs` is the device type that its
costs must be measured on, or "". An ended job's answer is `answers[content]`."""

events = Table(
    "events",
    metadata,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("kind", String(20), nullable=False),
    Column("data", JSON, nullable=False),
)
"""What happened to a job, in order."""

workers = Table(
    "workers",
    metadata,
    Column("name", String(100), primary_key=True),
    Column("devices", JSON, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("seen_at", Double, nullable=False),
)
"""Who solves, and on which device types it can measure."""

tallies = Table(
    "tallies",
    metadata,
    Column("name", String(60), primary_key=True),
    Column("labels", String(200), primary_key=True),
    Column("amount", Double, nullable=False),
)
"""Counters that outlive processes, for the metrics."""
