"""Serves the metrics of a job over HTTP, from a thread of the coordinator's process.

A scraper cannot disturb the job: the number of connections, the bytes of a request, the time to send it and to read the
answer, and the turns per second are limited; and the answer is rendered at most twice a second.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdkit.errors import describe

METRICS = "HVDKIT_METRICS"
"""Variable with the address at which the coordinator serves metrics: ``PORT`` or ``HOST:PORT``."""
_LOCAL = "127.0.0.1"
_HEAD_END = b"\r\n\r\n"
# Limits: open connections and waiting ones, bytes of a request, seconds for a connection, pause between two turns of
# the thread, seconds for which an answer is valid.
_MOST_CONNECTIONS = 64
_BACKLOG = 64
_LONGEST_REQUEST = 8192
_CONNECTION_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_FRESH_SECONDS = 0.5
_LOOK_SECONDS = 0.5
_MOST_ACCEPTED = 16


@dataclass(frozen=True)
class MetricsAddress:
    """Where metrics are served.

    Attributes:
        name: the option or the variable, for messages.
        host: a name or an address.
        port: 0 for any free one.
    """

    name: str
    host: str
    port: int

    @staticmethod
    def parse(name: str, text: str) -> MetricsAddress:
        """Parse ``PORT`` or ``HOST:PORT``. Raises ValueError if it is neither.

        Example:
            >>> MetricsAddress.parse("--metrics-port", "0.0.0.0:9090")
            MetricsAddress(name='--metrics-port', host='0.0.0.0', port=9090)
        """
        host, colon, port = text.rpartition(":")
        is_valid = port.isascii() and port.isdigit() and int(port) <= 65535 and (bool(host) or not colon)
        if not is_valid:
            expected = "a port from 0 to 65535, or HOST:PORT"
            raise ValueError(describe(name, text, expected, "write e.g. 9090, 0.0.0.0:9090, or 0 for any free port"))
        return MetricsAddress(name, host.removeprefix("[").removesuffix("]") or _LOCAL, int(port))

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises ValueError if the port is in use, or the host is not of this machine."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return socket.create_server(found[0][4][:2], family=found[0][0], backlog=_BACKLOG)
        except OSError as error:
            is_of_name = error.errno is None or isinstance(error, socket.gaierror)
            reason = error.strerror if is_of_name else os.strerror(error.errno or 0)
            got = f"{self.host}:{self.port} ({reason})"
            remedy = "choose another port, or 0 for any free one; HOST must be an address of this host"
            raise ValueError(describe(self.name, got, f"a free port of {socket.gethostname()}", remedy)) from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of the metrics that are served on ``listener``."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def address_from_environment() -> MetricsAddress | None:
    """Return the address that ``HVDKIT_METRICS`` names, or None. Raises ValueError if it is invalid."""
    text = os.environ.get(METRICS)
    return MetricsAddress.parse(METRICS, text) if text else None


@dataclass(eq=False)
class _Scrape:
    """A connection of a scraper."""

    connected: socket.socket
    until: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class MetricsServer:
    """Answers ``GET /metrics`` on ``listener`` with what ``text`` returns, which is called in the server's thread."""

    def __init__(self, listener: socket.socket, text: Callable[[], str]) -> None:
        self._listener = listener
        self._text = text
        self._selector = selectors.DefaultSelector()
        self._scrapes: dict[_Scrape, None] = {}  # in order of arrival
        self._metrics = b""  # the last answer with metrics, and when it was made
        self._made_at = float("-inf")
        self._closing = threading.Event()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hvdkit-metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and close the listener."""
        self._closing.set()
        self._thread.join()
        for scrape in list(self._scrapes):
            self._drop(scrape)
        self._selector.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(_LOOK_SECONDS):
                try:
                    self._serve(key)
                except OSError:  # the scraper has gone
                    if key.data is not None:
                        self._drop(key.data)
            now = time.monotonic()
            while self._scrapes and next(iter(self._scrapes)).until < now:
                self._drop(next(iter(self._scrapes)))
            time.sleep(_PAUSE_SECONDS)  # whatever scrapers do, this thread takes little of a core

    def _serve(self, key: selectors.SelectorKey) -> None:
        scrape: _Scrape | None = key.data
        if scrape is None:
            self._accept()
        elif scrape not in self._scrapes:  # dropped in this turn
            return
        elif scrape.answer is None:
            self._read(scrape)
        else:
            self._write(scrape, scrape.answer)

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                connected = self._listener.accept()[0]
            except BlockingIOError:
                return
            connected.setblocking(False)
            if len(self._scrapes) >= _MOST_CONNECTIONS:
                self._drop(next(iter(self._scrapes)))
            scrape = _Scrape(connected, time.monotonic() + _CONNECTION_SECONDS)
            self._scrapes[scrape] = None
            self._selector.register(connected, selectors.EVENT_READ, scrape)

    def _read(self, scrape: _Scrape) -> None:
        data = scrape.connected.recv(_LONGEST_REQUEST)
        scrape.request += data
        if _HEAD_END in scrape.request or b"\n\n" in scrape.request:
            scrape.answer = memoryview(self._answer(bytes(scrape.request)))
            self._selector.modify(scrape.connected, selectors.EVENT_WRITE, scrape)
        elif not data or len(scrape.request) > _LONGEST_REQUEST:
            self._drop(scrape)

    def _write(self, scrape: _Scrape, answer: memoryview) -> None:
        scrape.answer = answer[scrape.connected.send(answer) :]
        if not scrape.answer:
            self._drop(scrape)

    def _drop(self, scrape: _Scrape) -> None:
        del self._scrapes[scrape]
        self._selector.unregister(scrape.connected)
        scrape.connected.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"GET /metrics\n")
        if path != b"/metrics":
            return _response("404 Not Found", b"GET /metrics\n")
        now = time.monotonic()
        if now - self._made_at > _FRESH_SECONDS:
            self._metrics = _response("200 OK", self._text().encode(errors="replace"))
            self._made_at = now
        return self._metrics if method == b"GET" else self._metrics[: self._metrics.index(_HEAD_END) + len(_HEAD_END)]


def _response(status: str, body: bytes) -> bytes:
    head = [
        f"HTTP/1.1 {status}",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join(head).encode() + _HEAD_END + body
