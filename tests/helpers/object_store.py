"""A real S3 server on this host, and a proxy in front of it that answers with faults."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from hvdkit.checkpoint import stores

BUCKET = "bucket"
SECRET = "a-secret-key"
Fault = Callable[["Request"], "int | str | None"]


@dataclass(frozen=True)
class Request:
    """One request to the store.

    Attributes:
        number: counts from 0.
        method: PUT, GET, HEAD, POST or DELETE.
        key: the object's key, with the query.
        range: the header Range, or "".
    """

    number: int
    method: str
    key: str
    range: str


@dataclass
class Store:
    """The server, as tests see it.

    Attributes:
        port: of the proxy.
        requests: all requests so far.
        fault: decides about each request: None to forward it, a status to answer, "cut" to close the connection after
            the half of the answer, or "refuse" to close it without one.
    """

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    fault: Fault = lambda request: None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the store."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def names(self, folder: str) -> list[str]:
        """Return the keys below a folder of the bucket, without it."""
        import s3fs

        filesystem = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        return sorted(key.removeprefix(f"{BUCKET}/{folder}/") for key in filesystem.find(f"{BUCKET}/{folder}"))


@contextlib.contextmanager
def served() -> Iterator[Store]:
    """Serve a store with an empty bucket, and let this process reach it by its environment."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs every request
    store = Store()
    proxy = _proxy(store, server.get_host_and_port()[1])
    before = dict(os.environ)
    os.environ.update(store.environment)
    s3fs.S3FileSystem.clear_instance_cache()  # clients of another server
    try:
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        store.requests.clear()
        yield store
    finally:
        os.environ.clear()
        os.environ.update(before)
        proxy.shutdown()
        proxy.server_close()
        server.stop()


def make_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients of the store not repeat requests, and hvdkit repeat those outside of saves only briefly."""
    import s3fs

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.1)
    s3fs.S3FileSystem.clear_instance_cache()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients are killed on purpose."""


def _proxy(store: Store, target: int) -> http.server.ThreadingHTTPServer:
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                key = self.path.removeprefix(f"/{BUCKET}/")
                request = Request(len(store.requests), self.command, key, self.headers.get("Range") or "")
                store.requests.append(request)
            fault = store.fault(request)
            if fault == "refuse":
                self.close_connection = True
                return
            if isinstance(fault, int):
                self.reply(fault, [("Content-Type", "application/xml")], _error(fault))
                return
            connection = http.client.HTTPConnection("127.0.0.1", target)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            self.reply(response.status, response.getheaders(), response.read(), cut=fault == "cut")
            connection.close()

        def reply(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            hidden = ("connection", "transfer-encoding", "date", "server")
            for name, value in headers:
                if name.lower() not in hidden and not (name.lower() == "content-length" and self.command != "HEAD"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    proxy = _Server(("127.0.0.1", 0), Handler)
    store.port = proxy.server_address[1]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    return proxy


def _error(status: int) -> bytes:
    codes = {403: "AccessDenied", 404: "NoSuchKey", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}
    return f"<Error><Code>{codes[status]}</Code><Message>told so by a test</Message></Error>".encode()
