"""Request bodies: read and unzipped within limits of bytes and time, refused by what they are."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import fail_after
from starlette.requests import ClientDisconnect, Request

from remat_server.problems import ServiceProblem

_MAGIC = {
    b"PK\x03\x04": "a zip archive (perhaps a .pt2 or .pt file)",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x1f\x8b": "gzip without the header `Content-Encoding: gzip`",
}
_CLOSE = {"Connection": "close"}
"""The rest of such a body is not read."""
_INSTEAD = (
    '; post JSON: {"trace": ..., "budget": ...} with the document that trace.save() wrote. '
    "Archives and pickles can run code when they are read, so the service reads neither"
)
_AT_ONCE = 4
"""How many bodies of the largest size are held at a time."""
_LONGEST_S = 120.0
"""For a body to come, so that nobody holds its memory by sending nothing more."""


class Bodies:
    """Reads bodies, and holds no more of them at a time than there is room for."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = _AT_ONCE * limit_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body's JSON text, for as long as it is needed.

        Raises `ServiceProblem` 400, 408, 413, 415 or, where there is no room for now, 503.
        """
        is_zipped = _is_zipped(request, self._limit_bytes)
        parts: list[bytes] = []
        try:
            try:
                with fail_after(_LONGEST_S):
                    async for part in _parts(request, self._limit_bytes, is_zipped=is_zipped):
                        self._take(len(part))
                        parts.append(part)
            except TimeoutError:
                text = f"the body did not come within {_LONGEST_S:g} s"
                raise ServiceProblem(408, text, headers=_CLOSE) from None
            yield _checked(b"".join(parts))
        finally:
            self._room_bytes += sum(map(len, parts))

    def _take(self, size_bytes: int) -> None:
        if size_bytes > self._room_bytes:
            text = "many large requests are being sent to this service now; try again"
            raise ServiceProblem(503, text, headers={"Retry-After": "2", **_CLOSE})
        self._room_bytes -= size_bytes


def _is_zipped(request: Request, limit_bytes: int) -> bool:
    """What the headers say of a body. Raises `ServiceProblem` 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ServiceProblem(415, f"the body is {kind[:80] or 'of no stated kind'}{_INSTEAD}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("gzip", "identity"):
        raise ServiceProblem(415, f"the coding {coding[:80]} is not understood; use gzip")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit_bytes):
        raise _too_large(limit_bytes)
    return coding == "gzip"


def _checked(body: bytes) -> bytes:
    for magic, what in _MAGIC.items():
        if body.startswith(magic):
            raise ServiceProblem(415, f"the body is {what}{_INSTEAD}")
    if not body:
        raise ServiceProblem(400, "the body is empty" + _INSTEAD)
    return body


async def _parts(request: Request, limit_bytes: int, *, is_zipped: bool) -> AsyncIterator[bytes]:
    unzip = zlib.decompressobj(wbits=31) if is_zipped else None
    size = received = 0
    try:
        async for chunk in request.stream():
            part = chunk
            received += len(chunk)  # which a gzip stream of nothing makes large, too
            if unzip is not None:
                part = unzip.decompress(chunk, limit_bytes + 1 - size)
                if unzip.unused_data:
                    raise ServiceProblem(400, "the gzip stream is followed by something else")
            size += len(part)
            if max(size, received) > limit_bytes or (unzip is not None and unzip.unconsumed_tail):
                raise _too_large(limit_bytes)
            yield part
    except zlib.error as error:
        raise ServiceProblem(400, f"the body is no gzip stream: {error}") from None
    except ClientDisconnect:
        raise ServiceProblem(400, "the body was cut off") from None
    if unzip is not None and not unzip.eof:
        raise ServiceProblem(400, "the gzip stream is cut off")


def _too_large(limit_bytes: int) -> ServiceProblem:
    return ServiceProblem(
        413,
        f"the body is over {limit_bytes:,} bytes when unzipped; a real trace of a hundred layers "
        "has about 10 MB. The operator may raise REMAT_BODY_BYTES",
        headers=_CLOSE,
    )
