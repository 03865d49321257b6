"""The tables of the store. `migrations/` has their history. Times are seconds since 1970 by the
database's clock."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
)
"""API keys, with a digest of the secret, not the secret."""

answers = sa.Table(
    "answers",
    metadata,
    sa.Column("content", sa.String(64), primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("summary", sa.JSON, nullable=False),
    sa.Column("used_at", sa.Double, nullable=False, index=True),
)
"""Answers of successful jobs, by the digest of the request. Jobs with the same request share
one."""

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("owner", sa.String(32), nullable=False),
    sa.Column("kind", sa.String(10), nullable=False),
    sa.Column("status", sa.String(12), nullable=False),
    sa.Column("model", sa.String(500), nullable=False),
    sa.Column("content", sa.String(64), nullable=False, index=True),
    sa.Column("needs", sa.String(20), nullable=False),
    sa.Column("request", sa.LargeBinary),
    sa.Column("idempotency_key", sa.String(200)),
    sa.Column("request_id", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("finished_at", sa.Double, index=True),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("worker", sa.String(100)),
    sa.Column("lease_until", sa.Double),
    sa.Column("cancelled", sa.Boolean, nullable=False, default=False),
    sa.Column("revision", sa.Integer, nullable=False, default=0),
    sa.Column("progress", sa.JSON(none_as_null=True)),
    sa.Column("problem", sa.JSON(none_as_null=True)),
    sa.UniqueConstraint("owner", "idempotency_key"),
    sa.Index("jobs_by_status", "status", "number"),
    sa.Index("jobs_by_owner", "owner", "number"),
)
"""Jobs. `request` is gzipped JSON, deleted once the job has ended. `needs` is the device type that
must measure the costs, or "". The answer of a job that has ended is `answers[content]`."""

events = sa.Table(
    "events",
    metadata,
    sa.Column("job", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)
"""The events of each job, in order."""

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("devices", sa.JSON, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False),
)
"""Workers, and the device types on which they can measure."""

tallies = sa.Table(
    "tallies",
    metadata,
    sa.Column("name", sa.String(60), primary_key=True),
    sa.Column("labels", sa.String(200), primary_key=True),
    sa.Column("amount", sa.Double, nullable=False),
)
"""Counters for the metrics, which survive restarts of the service."""
