"""`Connection`: requests to a service that may be busy or gone for a while, and its answers."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from remat.documents.base import R, validate_json
from remat.errors import DocumentError, RematError, ServiceError
from remat.progress import Cancel, Progress, ProgressCallback
from remat.service import wire
from remat.version import VERSION

PATIENCE_S = 60.0
"""How long a service may be gone (restarted, say) before a call gives up."""

_BUSY = (429, 503)
"""What a service says that is to be asked again."""
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_SILENCE_S = 40.0
"""After how long without a word, of which it sends one in 15 s, a service is taken for gone."""
_CANCEL_S = 2.0
"""How often a wait that can be cancelled looks whether it was."""
_COMPRESSION = 6


class NotThere(ServiceError):
    """The service knows of no such thing."""


class Connection:
    """HTTP to one service. Raises `ServiceError` where it cannot be reached, wants another key, or
    fails, and else what the local call would raise."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        try:
            import httpx2
        except ImportError:
            raise ServiceError("remat.Client needs httpx2: pip install 'remat[client]'") from None
        if not url.startswith(("http://", "https://")):
            raise ServiceError(f"{url!r} is no address of a service, like 'http://host:8000'")
        headers = {"User-Agent": f"remat/{VERSION}"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url.rstrip("/")
        self._http = httpx2.Client(base_url=self._url, headers=headers, timeout=timeout_s)
        self._unreachable: type[Exception] = httpx2.TransportError
        self._silent: type[Exception] = httpx2.ReadTimeout

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def job(self, id: str) -> wire.JobView:
        """How a job stands."""
        return self.read(self.call("GET", f"/jobs/{id}"), wire.JobView)

    def watch(self, id: str, progress: ProgressCallback | None, cancel: Cancel | None) -> None:
        """Follow a job's events to its end, over lost connections."""
        last = "0"
        gone_since: float | None = None
        while True:
            try:
                silence_s = _SILENCE_S if cancel is None else _CANCEL_S
                for kind, data, number in self._events(id, last, silence_s):
                    last, gone_since = number, None
                    if cancel is not None and cancel.is_set():
                        raise RematError("cancelled before the service had an answer")
                    if kind == "done":
                        return
                    if progress is not None and kind in ("progress", "incumbent"):
                        progress(_progress(data))
                if self.job(id).status in wire.ENDED:
                    return
            except self._silent:
                gone_since = None  # nothing happened for a while: see whether to go on
            except self._unreachable as error:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() > gone_since + PATIENCE_S:
                    raise self._lost(error) from None
            if cancel is not None and cancel.is_set():
                raise RematError("cancelled before the service had an answer")
            if gone_since is not None:
                time.sleep(_PAUSE_S)

    def _events(self, id: str, last: str, silence_s: float) -> Iterator[tuple[str, str, str]]:
        headers = {"Last-Event-ID": last}
        path = f"/jobs/{id}/events"
        with self._http.sse(path, headers=headers, timeout=silence_s) as source:
            if source.response.status_code != 200:
                source.response.read()
                if source.response.status_code in _BUSY:
                    raise self._unreachable(str(_problem(source.response)))
                raise _problem(source.response)
            for event in source:
                yield event.event, event.data, event.id or last

    def post(
        self,
        request: wire.SolveRequest | wire.SweepRequest,
        headers: Mapping[str, str],
        **query: str,
    ) -> bytes:
        """Send a request, and what the service answers at once."""
        where = "/solve" if isinstance(request, wire.SolveRequest) else "/sweeps"
        body = gzip.compress(request.model_dump_json().encode(), compresslevel=_COMPRESSION)
        sent = {"Content-Type": "application/json", "Content-Encoding": "gzip", **headers}
        return self.call("POST", where, content=body, headers=sent, params=query)

    def call(self, method: str, path: str, **options: Any) -> bytes:
        """One request, again while the service is gone or too busy. Safe: reads, and writes under
        an idempotency key."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = self._http.request(method, path, **options)
            except self._unreachable as error:
                if time.monotonic() > until:
                    raise self._lost(error) from None
                time.sleep(_PAUSE_S)
                continue
            if response.status_code in _BUSY and time.monotonic() < until:
                after = response.headers.get("Retry-After", "")
                time.sleep(min(float(after), _LONGEST_PAUSE_S) if after.isdecimal() else _PAUSE_S)
                continue
            if response.status_code >= 400:
                raise _problem(response)
            return response.content

    def _lost(self, error: Exception) -> ServiceError:
        return ServiceError(
            f"the service at {self._url} cannot be reached ({error or type(error).__name__}); is "
            "it running (remat serve), and is the address right?"
        )

    def cancel(self, id: str) -> None:
        """Cancel a job, or forget one that has ended. A request whose answer was lost is sent again
        only where it did nothing: a second one would forget what the first cancelled."""
        had_ended = self.job(id).status in wire.ENDED
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = self._http.request("DELETE", f"/jobs/{id}")
            except self._unreachable as error:
                if time.monotonic() > until:
                    raise self._lost(error) from None
                time.sleep(_PAUSE_S)
                if self._is_done(id, had_ended=had_ended):
                    return
                continue
            if response.status_code not in _BUSY or time.monotonic() > until:
                break
            time.sleep(_PAUSE_S)
        if response.status_code >= 400:
            raise _problem(response)

    def _is_done(self, id: str, *, had_ended: bool) -> bool:
        try:
            return self.job(id).status in wire.ENDED and not had_ended
        except NotThere:  # forgotten
            return True

    def cancel_quietly(self, id: str) -> None:
        """Cancel a job whose wait was interrupted; a service that is gone needs no telling."""
        with suppress(self._unreachable):
            self._http.request("DELETE", f"/jobs/{id}", timeout=5.0)

    def read(self, body: bytes, kind: type[R]) -> R:
        """An answer of the service. Raises `ServiceError` for what is none."""
        try:
            return validate_json(kind, body, kind.__name__)
        except DocumentError as error:
            raise ServiceError(
                f"the service at {self._url} sent what this remat cannot read ({error}); are both "
                f"of the same version ({VERSION} here)?"
            ) from None


def _progress(data: str) -> Progress:
    record = validate_json(wire.ProgressRecord, data, "progress")
    return Progress(**dict(record))


def _problem(response: Any) -> RematError:
    try:
        problem = validate_json(wire.Problem, response.content, "problem")
        return NotThere(problem.detail) if response.status_code == 404 else problem.exception()
    except DocumentError:
        return ServiceError(
            f"the service answered {response.status_code}: {response.text[:200]!r}; is this the "
            "address of a remat service?"
        )
