"""`Connection`: HTTP requests to a service, repeated while it is busy or unreachable."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from remat.documents.base import R, validate_json
from remat.errors import DocumentError, RematError, ServiceError
from remat.progress import Cancel, Progress, ProgressCallback, is_cancelled
from remat.service import wire
from remat.version import VERSION

MAX_OUTAGE_S = 60.0
"""How long a service may be unreachable, during a restart for example, before a call fails."""

_BUSY_STATUSES = (429, 503)
"""HTTP statuses after which the request is repeated."""

_RETRY_PAUSE_S = 0.5
_MAX_RETRY_PAUSE_S = 5.0
_MAX_SILENCE_S = 40.0
"""A stream of events without data for this long is considered broken. The service sends a comment
every 15 s."""

_CANCEL_CHECK_S = 2.0
"""How often a wait checks whether it was cancelled."""

_COMPRESSION_LEVEL = 6
_PATHS = {wire.SolveRequest: "/solve", wire.SweepRequest: "/sweeps", wire.FitRequest: "/fit"}
_CANCELLED = "cancelled before the service had a result"


class NotFoundError(ServiceError):
    """The service has no job with this id."""


class Connection:
    """The HTTP connection to a service. Its methods raise `ServiceError` if the service cannot be
    reached, rejects the key or fails; other errors are those of the local call."""

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
        """Close the HTTP connections."""
        self._http.close()

    def job(self, id: str) -> wire.JobView:
        """Return the state of a job."""
        return self.read(self.call("GET", f"/jobs/{id}"), wire.JobView)

    def watch(self, id: str, progress: ProgressCallback | None, cancel: Cancel | None) -> None:
        """Follow a job's events until it ends, and report them to `progress`. A broken connection
        is opened again at the last event. Raises `RematError` if `cancel` is set."""
        last_event = "0"
        unreachable_since: float | None = None
        silence_s = _MAX_SILENCE_S if cancel is None else _CANCEL_CHECK_S
        while True:
            try:
                for kind, data, number in self._events(id, last_event, silence_s):
                    last_event, unreachable_since = number, None
                    if is_cancelled(cancel):
                        raise RematError(_CANCELLED)
                    if kind == "done":
                        return
                    if progress is not None and kind in ("progress", "incumbent"):
                        progress(_progress_of_event(data))
                if self.job(id).status in wire.ENDED_STATES:
                    return
            except self._unreachable as error:
                # Without events for a while, only an answer shows that the service is still there.
                if isinstance(error, self._silent) and self._answers(f"/jobs/{id}", silence_s):
                    unreachable_since = None
                else:
                    unreachable_since = unreachable_since or time.monotonic()
                    if time.monotonic() > unreachable_since + MAX_OUTAGE_S:
                        raise self._unreachable_error(error) from None
            if is_cancelled(cancel):
                raise RematError(_CANCELLED)
            if unreachable_since is not None:
                time.sleep(_RETRY_PAUSE_S)

    def _answers(self, path: str, timeout_s: float) -> bool:
        """True if the service answers a GET request, whatever the answer is."""
        try:
            self._http.request("GET", path, timeout=timeout_s)
        except self._unreachable:
            return False
        return True

    def _events(self, id: str, last_event: str, silence_s: float) -> Iterator[tuple[str, str, str]]:
        """Yield (kind, data, event id) of a job's events after the event `last_event`. Raises a
        timeout if none arrives for `silence_s`."""
        headers = {"Last-Event-ID": last_event}
        path = f"/jobs/{id}/events"
        with self._http.sse(path, headers=headers, timeout=silence_s) as source:
            if source.response.status_code != 200:
                source.response.read()
                if source.response.status_code in _BUSY_STATUSES:
                    raise self._unreachable(str(_response_error(source.response)))
                raise _response_error(source.response)
            for event in source:
                yield event.event, event.data, event.id or last_event

    def post(
        self,
        request: wire.AnyRequest,
        headers: Mapping[str, str],
        **query: str,
    ) -> bytes:
        """Post a request to its route and return the body of the response."""
        path = _PATHS[type(request)]
        body = gzip.compress(request.model_dump_json().encode(), compresslevel=_COMPRESSION_LEVEL)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", **headers}
        return self.call("POST", path, content=body, headers=headers, params=query)

    def post_snapshot(self, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Post a memory snapshot, or the text of an error, and return the body of the response."""
        body = gzip.compress(content, compresslevel=_COMPRESSION_LEVEL)
        media = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
        return self.call("POST", "/why", content=body, headers={**media, **headers})

    def call(
        self,
        method: str,
        path: str,
        *,
        has_effect: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> bytes:
        """Send a request, repeat it while the service is unreachable or busy, and return the body
        of the response. The request must be safe to repeat: a read, or a write with an idempotency
        key. Otherwise `has_effect` must tell after a lost response if it was carried out; then
        return b""."""
        deadline = time.monotonic() + MAX_OUTAGE_S
        while True:
            try:
                response = self._http.request(method, path, **options)
            except self._unreachable as error:
                if time.monotonic() > deadline:
                    raise self._unreachable_error(error) from None
                time.sleep(_RETRY_PAUSE_S)
                if has_effect():
                    return b""
                continue
            if response.status_code not in _BUSY_STATUSES or time.monotonic() > deadline:
                break
            retry_after = response.headers.get("Retry-After", "")
            is_number = retry_after.isdecimal()
            time.sleep(min(float(retry_after), _MAX_RETRY_PAUSE_S) if is_number else _RETRY_PAUSE_S)
        if response.status_code >= 400:
            raise _response_error(response)
        return response.content

    def _unreachable_error(self, error: Exception) -> ServiceError:
        """Return the error for a service that cannot be reached."""
        return ServiceError(
            f"the service at {self._url} cannot be reached ({error or type(error).__name__}); is "
            "it running (remat serve), and is the address right?"
        )

    def cancel(self, id: str) -> None:
        """Cancel a job, or delete one that has ended. If the response is lost, the request is
        repeated only if it had no effect: a second one would delete the job that the first one
        cancelled."""
        had_ended = self.job(id).status in wire.ENDED_STATES

        def is_cancelled_or_deleted() -> bool:
            try:
                return self.job(id).status in wire.ENDED_STATES and not had_ended
            except NotFoundError:  # it was deleted
                return True

        self.call("DELETE", f"/jobs/{id}", has_effect=is_cancelled_or_deleted)

    def cancel_quietly(self, id: str) -> None:
        """Cancel a job whose wait was interrupted. Does nothing if the service is unreachable."""
        with suppress(self._unreachable):
            self._http.request("DELETE", f"/jobs/{id}", timeout=5.0)

    def read(self, body: bytes, kind: type[R]) -> R:
        """Return a response of the service as a record of type `kind`. Raises `ServiceError` if it
        is not one."""
        try:
            return validate_json(kind, body, kind.__name__)
        except DocumentError as error:
            raise ServiceError(
                f"the service at {self._url} sent what this remat cannot read ({error}); are both "
                f"of the same version ({VERSION} here)?"
            ) from None


def _progress_of_event(data: str) -> Progress:
    """Return the progress in the data of an event."""
    record = validate_json(wire.ProgressRecord, data, "progress")
    return Progress(**dict(record))


def _response_error(response: Any) -> RematError:
    """Return the error that the problem document of a response describes."""
    try:
        problem = validate_json(wire.ProblemDetails, response.content, "problem")
        return NotFoundError(problem.detail) if response.status_code == 404 else problem.exception()
    except DocumentError:
        return ServiceError(
            f"the service answered {response.status_code}: {response.text[:200]!r}; is this the "
            "address of a remat service?"
        )
