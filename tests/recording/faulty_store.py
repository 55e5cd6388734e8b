"""An S3 server on loopback that fails as networks and object stores do: a proxy before one that does not."""

from __future__ import annotations

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

Faults = Callable[[str, int], str]
"""(path, requests for it so far) -> what happens to a request: one of ``KINDS``, or nothing."""

ERRORS: Final = {"error": (500, "InternalError"), "busy": (503, "SlowDown"), "denied": (403, "AccessDenied")}
KINDS: Final = (*ERRORS, "closed", "cut", "slow")
"""An answer with an error, none at all, one of which the second half never comes, one with a pause in its middle."""
PAUSE_S: Final = 0.2


class Store(ThreadingHTTPServer):
    """The proxy. ``faults`` may be changed while it serves."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.behind = port
        self.faults: Faults = lambda path, number: ""
        self.done: Counter[str] = Counter()
        """Requests by what happened to them."""
        self.of_path: Counter[str] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fate(self, path: str) -> str:
        """What happens to this request for a path."""
        with self.lock:
            fault = self.faults(path, self.of_path[path])
            self.of_path[path] += 1
            self.done[fault] += 1
        return fault


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def _answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fate(self.path)
        if fault in ERRORS:
            status, code = ERRORS[fault]
            text = f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode()
            self._send(status, [("Content-Type", "application/xml")], text)
            return
        if fault == "closed":
            self._close()
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        behind.request(self.command, self.path, sent, dict(self.headers))
        answer = behind.getresponse()
        headers = [each for each in answer.getheaders() if each[0].lower() not in ("transfer-encoding", "connection")]
        self._send(answer.status, headers, answer.read(), fault)
        behind.close()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """The method of any HTTP method, ``do_GET`` and so on."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self._answer

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: str = "") -> None:
        self.send_response_only(status)
        for name, value in headers:
            if self.command == "HEAD" or name.lower() != "content-length":
                self.send_header(name, value)
        if self.command == "HEAD":
            self.end_headers()
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        middle = len(body) // 2
        self.wfile.write(body[:middle])
        if fault == "cut":
            self._close()
            return
        if fault == "slow":
            threading.Event().wait(PAUSE_S)
        self.wfile.write(body[middle:])

    def _close(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def handle(self) -> None:
        """Serve the connection; a client that goes away is no error."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def faulty(port: int) -> Iterator[Store]:
    """A proxy before the server on this port of loopback."""
    store = Store(port)
    thread = threading.Thread(target=store.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()
