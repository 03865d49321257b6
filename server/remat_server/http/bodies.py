"""Request bodies: read within a limit, unzipped within the same limit, refused by what they are."""

from __future__ import annotations

import zlib

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
_INSTEAD = (
    '; post JSON: {"trace": ..., "budget": ...} with the document that trace.save() wrote. '
    "Archives and pickles can run code when they are read, so the service reads neither"
)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body's JSON text. Raises `ServiceProblem` 400, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ServiceProblem(415, f"the body is {kind[:80] or 'of no stated kind'}{_INSTEAD}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("gzip", "identity"):
        raise ServiceProblem(415, f"the coding {coding[:80]} is not understood; use gzip")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit_bytes):
        raise _too_large(limit_bytes)
    body = await _collect(request, limit_bytes, is_zipped=coding == "gzip")
    for magic, what in _MAGIC.items():
        if body.startswith(magic):
            raise ServiceProblem(415, f"the body is {what}{_INSTEAD}")
    if not body:
        raise ServiceProblem(400, "the body is empty" + _INSTEAD)
    return body


async def _collect(request: Request, limit_bytes: int, *, is_zipped: bool) -> bytes:
    unzip = zlib.decompressobj(wbits=31) if is_zipped else None
    parts: list[bytes] = []
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
            parts.append(part)
    except zlib.error as error:
        raise ServiceProblem(400, f"the body is no gzip stream: {error}") from None
    except ClientDisconnect:
        raise ServiceProblem(400, "the body was cut off") from None
    if unzip is not None and not unzip.eof:
        raise ServiceProblem(400, "the gzip stream is cut off")
    return b"".join(parts)


def _too_large(limit_bytes: int) -> ServiceProblem:
    return ServiceProblem(
        413,
        f"the body is over {limit_bytes:,} bytes when unzipped; a real trace of a hundred layers "
        "has about 10 MB. The operator may raise REMAT_BODY_BYTES",
        headers={"Connection": "close"},
    )
