"""API keys of the form `remat_<id>_<secret>`. The store has only a digest of the secret.

The secret has 256 random bits and cannot be guessed, so an unsalted digest is sufficient.
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
    """An API key without its secret."""

    id: str
    name: str
    created_at: float
    revoked_at: float | None


def add(connection: Connection, name: str) -> tuple[str, str]:
    """Create a key; return its id and the key, which is not stored."""
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    connection.execute(
        insert(keys).values(id=id, name=name[:200], digest=_digest(secret), created_at=now())
    )
    return id, f"remat_{id}_{secret}"


def list_keys(connection: Connection) -> list[Key]:
    """Return all keys, oldest first."""
    rows = connection.execute(select(keys).order_by(keys.c.created_at))
    return [Key(row.id, row.name, row.created_at, row.revoked_at) for row in rows]


def revoke(connection: Connection, id: str) -> bool:
    """Revoke a key; return False if there is no such active key."""
    active = update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None))
    return connection.execute(active.values(revoked_at=now())).rowcount > 0


def any_exist(connection: Connection) -> bool:
    """True if a key was ever created, even if it is revoked: then requests need a key."""
    return connection.execute(select(exists().select_from(keys))).scalar_one()


def owner_of(connection: Connection, key: str) -> str | None:
    """Return the id of a valid key, else None. Takes equally long for a wrong and a right
    secret."""
    prefix, _, rest = key.partition("_")
    id, _, secret = rest.partition("_")
    query = select(keys.c.digest).where(keys.c.id == id[:32], keys.c.revoked_at.is_(None))
    is_well_formed = prefix == "remat" and "\0" not in id  # PostgreSQL has no text with NUL
    digest = connection.execute(query).scalar() if is_well_formed else None
    is_valid = hmac.compare_digest(digest or "", _digest(secret))
    return id if is_valid else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
