"""Exits with 0 if the container is healthy: `healthcheck.py api` or `healthcheck.py worker`.

The API must report that it is ready. A worker has no port; it must have reported to the store
recently.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.request

WORKER_TIMEOUT_S = 60.0


def check_api() -> bool:
    """True if the API of this container accepts requests."""
    url = f"http://127.0.0.1:{os.environ.get('REMAT_PORT', '8000')}/readyz"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as reply:
        return reply.status == 200


def check_worker() -> bool:
    """True if a worker of this container reported to the store recently."""
    from sqlalchemy import exists, select

    from remat_server.settings import Settings
    from remat_server.store.database import Database, now
    from remat_server.store.tables import workers

    database = Database(Settings().store_url)
    is_here = workers.c.name.startswith(f"{socket.gethostname()[:60]}-", autoescape=True)
    is_alive = workers.c.seen_at > now() - WORKER_TIMEOUT_S
    with database.read() as connection:
        return connection.execute(select(exists().where(is_here, is_alive))).scalar_one()


if __name__ == "__main__":
    try:
        is_healthy = {"api": check_api, "worker": check_worker}[sys.argv[1]]()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.exit(not is_healthy)
