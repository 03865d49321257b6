"""Request bodies: reads and unzips them within limits of size and time; refuses other formats."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import fail_after
from starlette.requests import ClientDisconnect, Request

from remat_server.problems import ServiceProblem

_FORMATS_BY_MAGIC = {
    b"PK\x03\x04": "a zip archive (perhaps a .pt2 or .pt file)",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x1f\x8b": "gzip without the header `Content-Encoding: gzip`",
}
_CLOSE_CONNECTION = {"Connection": "close"}
"""Header of a response to a body of which the rest is not read."""
_FIELDS_BY_NAME = {"sweeps": '"budgets": [...]', "fit": '"optimizer": "adamw"'}
_WHY_MEDIA_TYPES = ("application/octet-stream", "text/plain")
_FIELDS_OF_SOLVE = '"budget": ...'
_CONCURRENT_BODIES = 4
"""Bodies of the largest size that fit into memory at a time."""
_BODY_TIMEOUT_S = 120.0
"""Time limit for a body to arrive, so that a stalled client does not occupy its memory."""


class BodyReader:
    """Reads bodies, within a limit of the memory for all bodies together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free_bytes = _CONCURRENT_BODIES * limit_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Provide the body's JSON text within the `with` block, and free its memory at the end.

        Raises `ServiceProblem` 400, 408, 413, 415, or 503 if too many bodies are in memory.
        """
        is_zipped = _is_zipped(request, self._limit_bytes)
        parts: list[bytes] = []
        try:
            try:
                with fail_after(_BODY_TIMEOUT_S):
                    async for part in _unzipped_parts(
                        request, self._limit_bytes, is_zipped=is_zipped
                    ):
                        self._reserve(len(part))
                        parts.append(part)
            except TimeoutError:
                text = f"the body did not arrive within {_BODY_TIMEOUT_S:g} s"
                raise ServiceProblem(408, text, headers=_CLOSE_CONNECTION) from None
            body = b"".join(parts)
            yield _check_snapshot(body) if _is_why(request) else _check_json(body, request)
        finally:
            self._free_bytes += sum(map(len, parts))

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes > self._free_bytes:
            text = "too many large requests are being sent to this service now; try again"
            raise ServiceProblem(503, text, headers={"Retry-After": "2", **_CLOSE_CONNECTION})
        self._free_bytes -= size_bytes


def _expected_body(request: Request) -> str:
    """Return what the body of a request to this path is, for an error about another body."""
    more = _FIELDS_BY_NAME.get(request.url.path.rpartition("/")[2], _FIELDS_OF_SOLVE)
    return (
        f'; post JSON: {{"trace": ..., {more}}} with the document that trace.save() wrote. '
        "Archives and pickles can run code when they are loaded, so the service accepts neither"
    )


def _is_zipped(request: Request, limit_bytes: int) -> bool:
    """True if the headers declare a gzipped body. Raises `ServiceProblem` 413 or 415."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or media_type.endswith("+json")
    if _is_why(request):
        if media_type not in _WHY_MEDIA_TYPES:
            expected = " or ".join(_WHY_MEDIA_TYPES)
            declared = f"is {media_type[:80]}" if media_type else "has no Content-Type"
            raise ServiceProblem(415, f"the body {declared}; post a snapshot as {expected}")
    elif not is_json:
        declared = f"is {media_type[:80]}" if media_type else "has no Content-Type"
        raise ServiceProblem(415, f"the body {declared}{_expected_body(request)}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("gzip", "identity"):
        raise ServiceProblem(
            415, f"the Content-Encoding {encoding[:80]} is not supported; use gzip"
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit_bytes):
        raise _too_large(limit_bytes)
    return encoding == "gzip"


def _is_why(request: Request) -> bool:
    """True for a request with a memory snapshot, or the text of an error, as its body."""
    return request.url.path.rpartition("/")[2] == "why"


def _check_snapshot(body: bytes) -> bytes:
    if not body:
        raise ServiceProblem(400, "the body is empty; post a memory snapshot, or an error's text")
    return body


def _check_json(body: bytes, request: Request) -> bytes:
    for magic, description in _FORMATS_BY_MAGIC.items():
        if body.startswith(magic):
            raise ServiceProblem(415, f"the body is {description}{_expected_body(request)}")
    if not body:
        raise ServiceProblem(400, "the body is empty" + _expected_body(request))
    return body


async def _unzipped_parts(
    request: Request, limit_bytes: int, *, is_zipped: bool
) -> AsyncIterator[bytes]:
    unzip = zlib.decompressobj(wbits=31) if is_zipped else None
    size = received = 0
    try:
        async for chunk in request.stream():
            part = chunk
            received += len(chunk)  # can be large even if a gzip stream unzips to nothing
            if unzip is not None:
                part = unzip.decompress(chunk, limit_bytes + 1 - size)
                if unzip.unused_data:
                    raise ServiceProblem(400, "the gzip stream is followed by other data")
            size += len(part)
            if max(size, received) > limit_bytes or (unzip is not None and unzip.unconsumed_tail):
                raise _too_large(limit_bytes)
            yield part
    except zlib.error as error:
        raise ServiceProblem(400, f"the body is not a gzip stream: {error}") from None
    except ClientDisconnect:
        raise ServiceProblem(400, "the body is incomplete") from None
    if unzip is not None and not unzip.eof:
        raise ServiceProblem(400, "the gzip stream is incomplete")


def _too_large(limit_bytes: int) -> ServiceProblem:
    return ServiceProblem(
        413,
        f"the body is over {limit_bytes:,} bytes when unzipped; a typical trace of a hundred "
        "layers has about 10 MB. The operator may raise REMAT_BODY_BYTES",
        headers=_CLOSE_CONNECTION,
    )
