"""Files of Google Cloud Storage: a local server of its JSON API that answers as told.

gcsfs needs 80 MB of packages, e.g. gRPC, so it is not among the tests' tools. If it is installed, these tests use it;
otherwise they use a class with those of its methods that hvdkit calls, which send the same requests.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import shutil
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import _registry
from helpers.data_files import reading_threads, wait_for_end

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import filesystems, reading_ahead, remote_cache

URL = "gs://bucket/day/a.npy"
ROWS = 2**15


class GCSFileSystem(AsyncFileSystem):
    """The methods of gcsfs that hvdkit calls."""

    protocol = "gs", "gcs"
    cachable = False

    async def _call(
        self, method: str, path: str, *, json_out: bool = False, headers: dict[str, str] | None = None
    ) -> Any:
        async with aiohttp.ClientSession() as session, session.request(method, path, headers=headers) as answer:
            contents = await answer.read()
            if answer.status == 404:
                raise FileNotFoundError(path)
            answer.raise_for_status()
            return json.loads(contents) if json_out else (answer.headers, contents)

    def url(self, path: str) -> str:
        bucket, _, name = path.partition("/")
        quoted = urllib.parse.quote(name, safe="")
        return f"{os.environ['STORAGE_EMULATOR_HOST']}/download/storage/v1/b/{bucket}/o/{quoted}?alt=media"

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        bucket, _, name = path.partition("/")
        quoted = urllib.parse.quote(name, safe="")
        host = os.environ["STORAGE_EMULATOR_HOST"]
        fields = await self._call("GET", f"{host}/storage/v1/b/{bucket}/o/{quoted}", json_out=True)
        return {**fields, "name": path, "type": "file", "size": int(fields["size"]), "mtime": fields["updated"]}

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        info = await self._info(path)
        return [info if detail else info["name"]]


class Store(http.server.ThreadingHTTPServer):
    """Serves one object.

    Attributes:
        manner: "right"; in other answers to requests for data, one thing is not as requested: "from 0" and "shifted"
            send another range, as their headers say; "total" is of a longer object, "generation" of another version;
            "whole" has status 200 and all data; "unnamed" has no Content-Range; "short" lacks the last bytes.
        generation: of the object.
        requests: the number of requests for data.
    """

    daemon_threads = True
    manner = "right"
    generation = 1
    requests = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        url = urllib.parse.urlparse(self.path)
        data = self.server.path.read_bytes()
        if urllib.parse.unquote(url.path).partition("/b/")[2] != "bucket/o/day/a.npy":
            items = {"kind": "storage#objects", "items": [], "prefixes": []}
            self.answer(404 if "/o/" in url.path else 200, {}, json.dumps(items).encode())
        elif "media" in urllib.parse.parse_qs(url.query).get("alt", []):
            self.server.requests += 1
            self.send_data(data)
        else:
            day = {"updated": "2026-01-01T00:00:00.000Z", "timeCreated": "2026-01-01T00:00:00.000Z"}
            version = {"generation": str(self.server.generation), "metageneration": "1", "etag": "CJ="}
            fields = {"kind": "storage#object", "bucket": "bucket", "name": "day/a.npy", "size": str(len(data))}
            self.answer(200, {}, json.dumps({**fields, **version, **day}).encode())

    def send_data(self, data: bytes) -> None:
        manner = self.server.manner
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        start, stop = first, min(len(data), last + 1)
        moved = {"from 0": start, "shifted": min(start, 64)}.get(manner, 0)
        start, stop = start - moved, stop - moved
        headers = {
            "ETag": "CJ=",
            "X-Goog-Generation": str(self.server.generation + (manner == "generation")),
            "Content-Range": f"bytes {start}-{stop - 1}/{len(data) + (manner == 'total')}",
        }
        if manner == "whole":
            del headers["Content-Range"]
            self.answer(200, headers, data)
            return
        if manner == "unnamed":
            del headers["Content-Range"]
        self.answer(206, headers, data[start : stop - (manner == "short")])

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_cache, "_CHUNK", 2**14)
    monkeypatch.setattr(filesystems, "LONGEST_WAIT", 0.05)
    monkeypatch.setenv("HVDKIT_DATA_CACHE", str(tmp_path / "cache"))
    np.save(tmp_path / "a.npy", np.arange(ROWS))
    if importlib.util.find_spec("gcsfs") is None:
        for name in GCSFileSystem.protocol:
            monkeypatch.setitem(_registry, name, GCSFileSystem)
    with Store(tmp_path / "a.npy") as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{store.server_address[1]}")
        yield store
        store.shutdown()
    fsspec.get_filesystem_class("gs").clear_instance_cache()


def values(source: Any) -> list[int]:
    return np.concatenate([*GlobalBatches(source, 1024, rank=0, size=1, epochs=1)]).tolist()


OTHER_ANSWERS = {
    "from 0": "an answer with 'bytes 0-",
    "shifted": "expected 'bytes ",
    "total": "has changed since it was listed",
    "generation": "has changed since it was listed: its generation was 1, then 2",
    "whole": "does not know ranges",
    "unnamed": "does not know ranges",
    "short": "bytes instead of",
}


@pytest.mark.full
def test_an_answer_of_another_range_or_generation_is_an_error(store):
    assert values(hk.data.npy(URL)) == [*range(ROWS)] and store.requests > 8
    for manner, text in OTHER_ANSWERS.items():
        store.manner = "right"
        shutil.rmtree(store.path.with_name("cache"))
        source = hk.data.npy(URL)
        store.manner = manner
        store.requests = 0
        with pytest.raises(hk.DataError, match=re.escape(text)) as error:
            values(source)
        assert URL in str(error.value), manner
        asked = 6 if manner == "short" else 1  # a connection may have been cut
        wait_for_end(reading_threads())  # they may still ask for the batches ahead
        assert store.requests <= asked * (1 + 2 * reading_ahead.threads()), manner


@pytest.mark.full
def test_an_object_that_is_replaced_by_one_of_the_same_size_is_named(store):
    source = hk.data.npy(URL)
    np.save(store.path, np.arange(ROWS) + 1)
    store.generation = 2
    with pytest.raises(hk.DataError, match=f"{URL} has changed since it was listed"):
        values(source)
    assert values(hk.data.npy(URL)) == [*range(1, ROWS + 1)]


@pytest.mark.full
def test_an_object_that_does_not_exist_is_named(store):
    with pytest.raises((hk.DataError, ValueError, FileNotFoundError), match=r"gs://bucket/day/b\.npy"):
        hk.data.npy("gs://bucket/day/b.npy")
