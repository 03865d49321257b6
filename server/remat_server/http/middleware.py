"""Middleware for every request: request id, log line, duration, security headers, allowed hosts."""

from __future__ import annotations

import re
import secrets
import time
from ipaddress import ip_address

import structlog
from prometheus_client import Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remat_server.http.problem_responses import problem_response
from remat_server.settings import Settings

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods in the metrics. A client may send any other, and each would create a time series."""
_DEBUG_PATHS = frozenset({"/livez", "/readyz", "/metrics"})


class RequestMiddleware:
    """ASGI middleware that refuses unknown hosts, sets headers, and logs and measures requests."""

    def __init__(self, app: ASGIApp, settings: Settings, request_histogram: Histogram) -> None:
        self._app, self._request_histogram = app, request_histogram
        self._hosts = _LOCAL_HOSTS | {host.lower() for host in settings.allowed_hosts}
        names = settings.allowed_hosts
        is_public = not settings.is_loopback and not names
        self._allows_any_host = "*" in names or (is_public and not settings.allow_anonymous)
        self._allows_local_names = is_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        id = client_id if _REQUEST_ID.fullmatch(client_id) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=id)
        started_at_s, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["X-Request-ID"] = id
                for name, value in _SECURITY_HEADERS.items():
                    response_headers.setdefault(name, value)
                if not scope["path"].startswith(("/docs", "/redoc")):
                    response_headers.setdefault("Content-Security-Policy", _CONTENT_SECURITY_POLICY)
                if scope["path"] == "/" or scope["path"].startswith("/static/"):
                    response_headers.setdefault("Cache-Control", "no-cache")  # never mix versions
            await send(message)

        try:
            if self._is_allowed_host(headers.get("host", "")):
                await self._app(scope, receive, send_with_headers)
            else:
                text = "this service does not allow the request's Host (see REMAT_ALLOWED_HOSTS)"
                await problem_response(400, text, "unknown-host")(scope, receive, send_with_headers)
        finally:
            seconds = time.perf_counter() - started_at_s
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._request_histogram.labels(method, route, str(status)).observe(seconds)
            log_request = log.debug if scope["path"] in _DEBUG_PATHS else log.info
            log_request(
                "request",
                method=scope["method"][:20],
                path=scope["path"][:200],
                status=status,
                seconds=round(seconds, 4),
            )

    def _is_allowed_host(self, host: str) -> bool:
        """True if the service accepts requests for this host name.

        Without keys, a web page of another site could reach the service through a host name of the
        site that resolves to this address (DNS rebinding). Names without a dot belong to the local
        network, so a service for all of that network accepts them, and addresses.
        """
        if self._allows_any_host:
            return True
        name = host.lower() if host.endswith("]") else host.lower().rpartition(":")[0]
        name = name or host.lower()
        return name in self._hosts or (self._allows_local_names and _is_local_name(name))


def _is_local_name(name: str) -> bool:
    """True if the name is an IP address, or has no dot."""
    if "." not in name and ":" not in name:
        return bool(name)
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
