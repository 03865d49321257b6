"""API keys: `remat_<id>_<secret>`. The store has the secret's digest only.

The secret has 256 random bits, so a plain digest is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, exists, insert, select, update

from remat_server.store.database import now
from remat_server.store.tables import keys


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is listed."""

    id: str
    name: str
    created_at: float
    revoked_at: float | None


def add(connection: Connection, name: str) -> tuple[str, str]:
    """A new key: its id, and the key itself, which nobody can see again."""
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    connection.execute(
        insert(keys).values(id=id, name=name[:200], digest=_digest(secret), created_at=now())
    )
    return id, f"remat_{id}_{secret}"


def listed(connection: Connection) -> list[Key]:
    """All keys, oldest first."""
    rows = connection.execute(select(keys).order_by(keys.c.created_at))
    return [Key(row.id, row.name, row.created_at, row.revoked_at) for row in rows]


def revoke(connection: Connection, id: str) -> bool:
    """End a key's use; False where there is no such key in use."""
    ended = update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None))
    return connection.execute(ended.values(revoked_at=now())).rowcount > 0


def is_any(connection: Connection) -> bool:
    """Whether keys were ever made: from then on, requests need one."""
    return connection.execute(select(exists().select_from(keys))).scalar_one()


def owner_of(connection: Connection, key: str) -> str | None:
    """The id of a valid key, else None. Takes as long for a wrong secret as for the right one."""
    prefix, _, rest = key.partition("_")
    id, _, secret = rest.partition("_")
    query = select(keys.c.digest).where(keys.c.id == id[:32], keys.c.revoked_at.is_(None))
    is_possible = prefix == "remat" and "\0" not in id  # PostgreSQL has no text with NUL
    digest = connection.execute(query).scalar() if is_possible else None
    is_right = hmac.compare_digest(digest or "", _digest(secret))
    return id if is_right else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
