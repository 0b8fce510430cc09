"""Files on servers: a local HTTP server that fails as told, and a local S3 server."""

import http.server
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import listing, remote_cache

ROWS = 30_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of the cache, with small chunks."""
    monkeypatch.setenv("HVDKIT_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_cache, "_CHUNK", 2**14)
    monkeypatch.setattr(listing, "LONGEST_WAIT", 0.05)
    return tmp_path / "cache"


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder with byte ranges.

    Attributes:
        failures: The number of requests for data that will be answered with an error, or cut off half way.
        requests: The number of requests for data so far.
    """

    daemon_threads = True
    failures = requests = 0

    def __init__(self, folder):
        self.folder = folder
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(with_data=False)

    def do_GET(self):
        self.answer(with_data=True)

    def answer(self, *, with_data):
        path = self.server.folder / self.path.strip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start, stop = 0, len(data)
        if with_data and "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, stop = int(first), min(stop, int(last) + 1)
        if with_data:
            self.server.requests += 1
            if self.server.failures:
                self.server.failures -= 1
                if self.server.failures % 2:
                    self.send_error(503)
                    return
        self.send_response(206 if with_data else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if with_data:
            cut = (start + stop) // 2 if self.server.failures else stop
            self.wfile.write(data[start:cut])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    write(tmp_path / "served" / "a.parquet")
    with Server(tmp_path / "served") as server:
        yield server
        server.shutdown()


def write(path):
    table = pa.table({"id": np.arange(ROWS), "noise": np.random.default_rng(0).normal(size=ROWS)})
    pq.write_table(table, path, row_group_size=2000)


def ids(source, **options):
    return [each.tolist() for each in (batch["id"] for batch in GlobalBatches(source, 1000, rank=0, size=1, **options))]


EXPECTED = np.arange(ROWS).reshape(-1, 1000).tolist()


def test_a_server_that_fails_is_asked_again(server):
    server.failures = 6
    assert ids(hk.data.parquet(server.url("a.parquet")), epochs=1) == EXPECTED
    assert server.failures == 0


def test_a_server_that_does_not_answer_is_named(server):
    source = hk.data.parquet(server.url("a.parquet"))
    server.failures = 10**6
    with pytest.raises(hk.DataError, match=r"bytes \d+ to \d+ of http://.*/a\.parquet could not be read"):
        ids(source, epochs=1)


def test_chunks_are_read_once_and_kept_up_to_a_limit(server, cache, monkeypatch):
    source = hk.data.parquet(server.url("a.parquet"))
    assert ids(source, epochs=1) == EXPECTED
    first = server.requests
    assert ids(source, epochs=1, shuffle="blocks") != EXPECTED and server.requests == first
    size = sum(path.stat().st_size for path in cache.iterdir())
    assert size >= (server.folder / "a.parquet").stat().st_size * 0.9
    monkeypatch.setenv("HVDKIT_DATA_CACHE_GB", "0.0001")
    monkeypatch.setattr(remote_cache, "_BETWEEN_SWEEPS", 2)
    write(server.folder / "b.parquet")
    assert ids(hk.data.parquet(server.url("b.parquet")), epochs=1) == EXPECTED
    assert sum(path.stat().st_size for path in cache.iterdir()) <= 100_000 + 2 * 2**14


def test_a_cache_that_cannot_be_written_is_left_out(server, cache, caplog):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file, not a folder")
    assert ids(hk.data.parquet(server.url("a.parquet")), epochs=1) == EXPECTED
    assert "data cache: cannot write" in caplog.text


def test_a_file_that_disappears_is_named(server):
    source = hk.data.parquet(server.url("a.parquet"))
    (server.folder / "a.parquet").unlink()
    with pytest.raises(hk.DataError, match=r"a\.parquet.* disappeared"):
        ids(source, epochs=1)
    with pytest.raises(ValueError, match=r"paths: got http.*c\.parquet,"):
        hk.data.parquet(server.url("c.parquet"))


def test_an_s3_server(tmp_path, monkeypatch):
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        import s3fs

        filesystem = s3fs.S3FileSystem(skip_instance_cache=True)
        filesystem.mkdir("bucket")
        for number in range(3):
            write(tmp_path / "part.parquet")
            filesystem.put(str(tmp_path / "part.parquet"), f"bucket/day/{number}.parquet")
        source = hk.data.parquet("s3://bucket/day/*.parquet", ["id"])
        assert source.examples == 3 * ROWS
        whole = np.concatenate(ids(source, epochs=1, shuffle_seed=1, shuffle="blocks"))
        assert sorted(whole) == sorted([*range(ROWS)] * 3)
    finally:
        server.stop()
