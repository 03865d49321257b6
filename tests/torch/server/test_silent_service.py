"""A client whose service is silent: it waits for one that is there, and gives up on others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import remat
from remat.service.connection import Connection

SILENT_STREAMS = 4


@contextmanager
def service(*, answers: bool) -> Iterator[str]:
    """Run a service whose first streams of events are silent, and yield its address. It answers
    nothing at all unless `answers`."""
    ended = threading.Event()
    streams: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_stream = self.path.endswith("/events")
            if is_stream:
                streams.append(self.path)
            if not answers or (is_stream and len(streams) <= SILENT_STREAMS):
                ended.wait(10)
                return
            body = b"event: done\ndata: {}\nid: 1\n\n" if is_stream else b"{}"
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(params=[None, "cancel"])
def cancel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> threading.Event | None:
    """The event that cancels a wait, or None; with short times."""
    for name in ("_MAX_SILENCE_S", "_CANCEL_CHECK_S", "_RETRY_PAUSE_S"):
        monkeypatch.setattr(f"remat.service.connection.{name}", 0.1)
    monkeypatch.setattr("remat.service.connection.MAX_OUTAGE_S", 0.3)
    return None if request.param is None else threading.Event()


def test_a_service_that_never_answers_is_unreachable(cancel: threading.Event | None) -> None:
    with service(answers=False) as url:
        connection = Connection(url)
        with pytest.raises(remat.ServiceError, match="cannot be reached"):
            connection.watch("x", None, cancel)
        connection.close()


def test_a_service_that_has_no_events_for_a_while_is_waited_for(
    cancel: threading.Event | None,
) -> None:
    with service(answers=True) as url:
        connection = Connection(url)
        connection.watch("x", None, cancel)
        connection.close()
