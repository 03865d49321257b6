"""Around every request: an id, one log line, its time, safe headers, and a known host."""

from __future__ import annotations

import re
import secrets
import time
from ipaddress import ip_address

import structlog
from prometheus_client import Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remat_server.http.problem_responses import answer
from remat_server.http.auth import Gate
from remat_server.settings import Settings

log = structlog.get_logger()

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""A client can make up others, each of which would be a series of its own in the metrics."""
_QUIET = frozenset({"/livez", "/readyz", "/metrics"})


class Surround:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: Settings, gate: Gate, requests: Histogram) -> None:
        self._app, self._gate, self._requests = app, gate, requests
        self._hosts = _LOCAL | {host.lower() for host in settings.allowed_hosts}
        names = settings.allowed_hosts
        reachable = not settings.is_loopback and not names
        self._is_open = "*" in names or (reachable and not settings.allow_anonymous)
        self._takes_plain = reachable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=id)
        began, status = time.perf_counter(), 500

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-ID"] = id
                for name, value in _HEADERS.items():
                    out.setdefault(name, value)
                if not scope["path"].startswith(("/docs", "/redoc")):
                    out.setdefault("Content-Security-Policy", _POLICY)
                if scope["path"] == "/" or scope["path"].startswith("/static/"):
                    out.setdefault("Cache-Control", "no-cache")  # parts of one version only
            await send(message)

        try:
            if self._is_known_host(headers.get("host", "")):
                await self._app(scope, receive, send_on)
            else:
                text = (
                    "the host that this request names is not this service's (REMAT_ALLOWED_HOSTS)"
                )
                await answer(400, text, "unknown-host")(scope, receive, send_on)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(method, route, str(status)).observe(seconds)
            tell = log.debug if scope["path"] in _QUIET else log.info
            tell(
                "request",
                method=scope["method"][:20],
                path=scope["path"][:200],
                status=status,
                seconds=round(seconds, 4),
            )

    def _is_known_host(self, host: str) -> bool:
        """Without keys, a page of another site could reach the service by a name of its own that
        it lets point here (DNS rebinding); so names are checked.

        Addresses are no names, and names without a dot are of the network's own: where everybody
        on it may use the service, these are known.
        """
        if self._is_open:
            return True
        name = host.lower() if host.endswith("]") else host.lower().rpartition(":")[0]
        name = name or host.lower()
        return name in self._hosts or (self._takes_plain and _is_plain(name))


def _is_plain(name: str) -> bool:
    if "." not in name and ":" not in name:
        return bool(name)
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
