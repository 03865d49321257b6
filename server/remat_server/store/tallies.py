"""Counters and histograms in the store, for Prometheus. They survive restarts of the service.

A histogram consists of a counter for each bucket, with the bucket's bound as the label `le`, and
one for the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from remat_server.store.database import upsert_into
from remat_server.store.tables import tallies

SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0, 3600.0)
GAPS = (0.0, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


def count(connection: Connection, name: str, amount: float = 1.0, **labels: str) -> None:
    """Add an amount to a counter."""
    text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    statement = upsert_into(connection, tallies).values(name=name, labels=text, amount=amount)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name", "labels"],
            set_={"amount": tallies.c.amount + statement.excluded.amount},
        )
    )


def observe(connection: Connection, name: str, amount: float, bounds: Sequence[float]) -> None:
    """Add a sample to a histogram."""
    bound = next((str(b) for b in bounds if amount <= b), "+Inf")
    count(connection, f"{name}_bucket", le=bound)
    count(connection, f"{name}_sum", amount)


def read(connection: Connection) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return all counters, as amounts by name and labels."""
    amounts: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for row in connection.execute(select(tallies)):
        pairs = [part.partition("=") for part in row.labels.split(",") if part]
        amounts.setdefault(row.name, {})[tuple((k, v) for k, _, v in pairs)] = row.amount
    return amounts
