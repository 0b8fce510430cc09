"""A real S3 server on this host, and a proxy in front of it that answers with faults."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import http.server
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

import hvdkit as hk
from helpers.delayed_listing import DelayedListings
from hvdkit.checkpoint import stores

BUCKET = "bucket"
RUN = f"s3://{BUCKET}/run"
STEP_1 = f"{RUN}/step-000000001"
STEP_2 = f"{RUN}/step-000000002"
SECRET = "a-secret-key"
Fault = Callable[["Request"], "int | str | None"]
_MOST_SKEW = 900.0  # seconds; S3 refuses a request whose time differs by more


@dataclass(frozen=True)
class Request:
    """One request to the store.

    Attributes:
        number: counts from 0.
        method: PUT, GET, HEAD, POST or DELETE.
        key: the object's key, with the query.
        range: the header Range, or "".
        length: bytes of its body.
    """

    number: int
    method: str
    key: str
    range: str
    length: int


@dataclass
class Store:
    """The server, as tests see it.

    Attributes:
        port: of the proxy.
        target: the port of the server itself.
        listings: which it answers while listings lag behind.
        requests: all requests so far.
        fault: decides about each request: None to forward it, a status to answer, "cut" to close the connection after
            the half of the answer, or "refuse" to close it without one.
        sent: bytes of objects that clients have received, by key.
        skew: seconds by which the server's clock is ahead.
        refuses_skew: whether it refuses requests of another time, as S3 does.
        listing_delay: seconds until a listing shows that an object was written or removed.
    """

    port: int
    target: int
    listings: DelayedListings
    requests: list[Request] = field(default_factory=list)
    fault: Fault = lambda request: None
    sent: Counter[str] = field(default_factory=Counter)
    skew: float = 0.0
    refuses_skew: bool = True
    listing_delay: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the store."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def clear(self) -> None:
        """Empty the bucket, forget the requests so far, and end all faults."""
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            connection = http.client.HTTPConnection("127.0.0.1", self.target)
            connection.request(method, path)
            assert connection.getresponse().status == 200
            connection.close()
        self.listings = DelayedListings(self.target)
        self.requests.clear()
        self.sent.clear()
        self.fault = lambda request: None
        self.skew = 0.0
        self.refuses_skew = True
        self.listing_delay = 0.0

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
    target = server.get_host_and_port()[1]
    store = Store(0, target, DelayedListings(target))
    proxy = _proxy(store)
    before = dict(os.environ)
    os.environ.update(store.environment)
    s3fs.S3FileSystem.clear_instance_cache()  # clients of another server
    try:
        store.clear()
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


def _proxy(store: Store) -> http.server.ThreadingHTTPServer:
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                key = self.path.removeprefix(f"/{BUCKET}/")
                ranges = self.headers.get("Range") or ""
                request = Request(len(store.requests), self.command, key, ranges, len(body))
                store.requests.append(request)
            fault = store.fault(request)
            if fault is None and store.refuses_skew and _skew(self.headers.get("X-Amz-Date"), store.skew) > _MOST_SKEW:
                fault = "skew"
            if fault == "refuse":
                self.close_connection = True
                return
            if fault == "skew":
                self.reply(403, _XML, _error("RequestTimeTooSkewed"))
                return
            if isinstance(fault, int):
                self.reply(fault, _XML, _error(_CODES[fault]))
                return
            if store.listing_delay and "list-type=2" in self.path:
                self.reply(200, _XML, store.listings.answer(self.path, store.listing_delay))
                return
            if store.listing_delay and self.command in ("PUT", "POST", "DELETE"):
                store.listings.note_change(self.path)
            connection = http.client.HTTPConnection("127.0.0.1", store.target)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            data = response.read()
            if self.command == "GET" and "list-type=2" not in self.path:
                with lock:
                    store.sent[key.partition("?")[0]] += len(data)
            self.reply(response.status, response.getheaders(), _later(data, store.skew), cut=fault == "cut")
            connection.close()

        def reply(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            self.send_header("Date", email.utils.formatdate(time.time() + store.skew, usegmt=True))
            hidden = ("connection", "transfer-encoding", "date", "server")
            for name, value in headers:
                if name.lower() == "last-modified":
                    then = email.utils.parsedate_to_datetime(value).timestamp() + store.skew
                    self.send_header(name, email.utils.formatdate(then, usegmt=True))
                    continue
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


_XML = [("Content-Type", "application/xml")]
_CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}
_LISTED_TIME = re.compile(rb"(?<=<LastModified>)[^<]+")


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>told so by a test</Message></Error>".encode()


def _skew(requested: str | None, skew: float) -> float:
    """Return the seconds between the time of a request and the server's."""
    if requested is None:
        return 0.0
    then = datetime.datetime.strptime(requested, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc)
    return abs(then.timestamp() - time.time() - skew)


def _later(data: bytes, skew: float) -> bytes:
    """Return an answer whose times are those of the server's clock."""

    def shifted(match: re.Match[bytes]) -> bytes:
        then = datetime.datetime.fromisoformat(match[0].decode().replace("Z", "+00:00"))
        return (then + datetime.timedelta(seconds=skew)).isoformat().encode()

    return _LISTED_TIME.sub(shifted, data) if skew else data


def state(value):
    """Return a state to save, which :func:`value_of` reads from a checkpoint."""
    return {"weights": np.full((8, 3), float(value)), "step": value}


def value_of(path):
    restored = hk.checkpoint.restore(path, state(0))
    assert np.all(restored["weights"] == restored["step"])
    return restored["step"]
