"""Files on servers: a local HTTP server that fails as told, and a local S3 server."""

import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from itertools import product

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import case
from helpers.data_files import reading_threads, wait_for_end
from helpers.speed import WAIT
from helpers.tiers import after_core

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import filesystems, listing, reading_ahead, remote_cache

ROWS = 30_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of the cache, with small chunks."""
    monkeypatch.setenv("HVDKIT_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_cache, "_CHUNK", 2**14)
    monkeypatch.setattr(filesystems, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(remote_cache, "_has_warned", False)
    return tmp_path / "cache"


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder with byte ranges.

    Attributes:
        refusals: The number of requests for a file's size that will be answered with an error.
        failures: The number of requests for data that will be answered with an error, or cut off half way.
        has_tags: Whether answers have an ETag.
        page: Of the folder, if not the links to its files.
        requests: The number of requests for data so far.
        ranges: How often each range of each file was requested.
        status: Of the answers that are errors.
        manner: How data are sent: "at once"; "slowly", a byte at a time; "half", then nothing, but the connection stays
            open; "whole", without ranges. In other answers, one thing is not as requested: "from 0" and "shifted" send
            another range, as their headers say; "total" and "tag" are of another version of the file; "unnamed" has no
            Content-Range, "compressed" a Content-Encoding.
        slow: The number of requests for which the manner applies.
    """

    daemon_threads = True
    failures = requests = refusals = 0
    page = ""
    has_tags = True
    status, manner, slow = 503, "at once", 10**6

    def __init__(self, folder):
        self.folder, self.ranges = folder, Counter()
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
        path = self.server.folder / urllib.parse.unquote(self.path).strip("/")
        if path.is_dir():
            links = "".join(f'<a href="{each.name}">{each.name}</a>' for each in path.iterdir())
            page = (self.server.page if path == self.server.folder and self.server.page else links).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page if with_data else b"")
            return
        if not path.is_file():
            self.send_error(404)
            return
        if "Range" not in self.headers and self.server.refusals:
            self.server.refusals -= 1
            self.send_error(self.server.status)
            return
        data = path.read_bytes()
        start, stop = 0, len(data)
        manner = self.server.manner if with_data else "at once"
        if manner != "at once":
            self.server.slow -= 1
            manner = manner if self.server.slow >= 0 else "at once"
        if with_data and "Range" in self.headers and manner != "whole":
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, stop = int(first), min(stop, int(last) + 1)
        if with_data and manner in ("from 0", "shifted"):
            moved = start if manner == "from 0" else min(start, 64)
            start, stop = start - moved, stop - moved
        if with_data:
            self.server.requests += 1
            self.server.ranges[path.name, start] += 1
            if self.server.failures:
                self.server.failures -= 1
                if self.server.failures % 2:
                    self.send_error(self.server.status)
                    return
        is_part = "Range" in self.headers and manner != "whole"
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        if self.server.has_tags:
            self.send_header("ETag", f'"{path.stat().st_mtime_ns + (manner == "tag")}"')
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        if manner == "compressed":
            self.send_header("Content-Encoding", "gzip")
        if is_part and manner != "unnamed":
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data) + (manner == 'total')}")
        self.end_headers()
        if with_data:
            cut = (start + stop) // 2 if self.server.failures or manner == "half" else stop
            if manner == "slowly":
                for place in range(start, stop):
                    self.wfile.write(data[place : place + 1])
                    time.sleep(0.05)
            self.wfile.write(data[start:cut])
            if manner == "half":
                self.wfile.flush()
                time.sleep(60)

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


@pytest.mark.full
def test_a_server_that_fails_to_give_sizes_is_asked_again(server):
    server.refusals = 2  # fsspec asks in two ways
    source = hk.data.parquet(server.url("a.parquet"))
    server.refusals = 2
    assert ids(source, epochs=1) == EXPECTED
    server.refusals = 10**6
    with pytest.raises(hk.DataError, match=r"a\.parquet could not be listed: ConnectionError: .*503"):
        hk.data.parquet(server.url("a.parquet"))


def test_a_server_that_does_not_exist_is_named():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("x.parquet", "x/"):  # a page of links
        words = rf"{name} could not be listed: (ConnectionError|ClientConnectorError): .*{port}"
        with case(name=name), pytest.raises(hk.DataError, match=words):
            hk.data.parquet(f"http://127.0.0.1:{port}/{name}")


def test_a_server_that_does_not_answer_is_named(server):
    source = hk.data.parquet(server.url("a.parquet"))
    server.failures = 10**6
    with pytest.raises(hk.DataError, match=r"bytes \d+ to \d+ of http://.*/a\.parquet could not be read"):
        ids(source, epochs=1)


@pytest.mark.parametrize("status", after_core([429, 500, 503], but=[503]))
def test_a_server_that_fails_is_asked_again(server, status):
    server.status, server.failures = status, 6
    assert ids(hk.data.parquet(server.url("a.parquet")), epochs=1) == EXPECTED
    assert server.failures == 0


@pytest.mark.full
@pytest.mark.parametrize("manner", ["half", pytest.param("slowly", marks=pytest.mark.nightly)])
def test_a_server_that_is_stuck_is_named(server, manner, monkeypatch):
    monkeypatch.setenv("HVDKIT_DATA_TIMEOUT_SECONDS", "0.5")
    source = hk.data.parquet(server.url("a.parquet"))
    server.manner = manner
    with pytest.raises(hk.DataError, match=r"bytes \d+ to \d+ of http://.*a\.parquet .*within 0\.5 s"):
        ids(source, epochs=1)


@pytest.mark.full
def test_a_server_that_is_stuck_once_is_asked_again(server, monkeypatch):
    monkeypatch.setenv("HVDKIT_DATA_TIMEOUT_SECONDS", "5")  # a busy machine answers within it
    server.manner, server.slow = "half", 1
    assert ids(hk.data.parquet(server.url("a.parquet")), epochs=1) == EXPECTED and server.slow == -server.requests + 1


INTERRUPTED = """
import os, signal, sys, threading
import hvdkit as hk

batches = hk.data.GlobalBatches(hk.data.npy(sys.argv[1]), 1, rank=0, size=1)
print("ready", flush=True)
sys.stdin.readline()
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
for _ in batches:
    pass
"""


@pytest.mark.full
def test_a_program_ends_while_a_server_is_stuck(server, monkeypatch):
    np.save(server.folder / "a.npy", np.zeros((20, 2**21 // 8)))
    monkeypatch.setenv("HVDKIT_DATA_TIMEOUT_SECONDS", str(100 * WAIT))
    program = [sys.executable, "-c", INTERRUPTED, server.url("a.npy")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        server.manner = "half"
        process.communicate("\n", timeout=WAIT)
        assert process.returncode != 0


def test_a_server_without_ranges_has_a_remedy(server):
    server.manner = "whole"
    with pytest.raises(hk.DataError, match=r"a\.parquet .*does not know ranges.*copy the files"):
        hk.data.parquet(server.url("a.parquet"))
    assert server.requests == 1


OTHER_ANSWERS = {
    "from 0": "an answer with 'bytes 0-",
    "shifted": "an answer with 'bytes 16320-",
    "total": "has changed since it was listed",
    "tag": "has changed since it was listed: its tag was",
    "unnamed": "does not know ranges",
    "compressed": "compresses what it sends",
}


@pytest.fixture
def stored(server, monkeypatch):
    """Return the URLs of an array of 16 chunks: over HTTP, and of the same server as a store."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url("").rstrip("/"))
    (server.folder / "bucket").mkdir()
    np.save(server.folder / "bucket" / "a.npy", np.arange(2**15))
    yield server.url("bucket/a.npy"), "s3://bucket/a.npy"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.full
def test_an_answer_of_another_range_or_version_is_an_error(server, stored, cache):
    for url in stored:
        for manner, text in OTHER_ANSWERS.items():
            server.manner, server.slow = "at once", 10**6
            shutil.rmtree(cache, ignore_errors=True)
            source = hk.data.npy(url)
            server.manner = manner
            if url.startswith("s3") and manner == "compressed":
                continue  # botocore does not decode what it receives
            before = server.requests
            with pytest.raises(hk.DataError, match=re.escape(text)) as error:
                ids_of_array(source)
            assert url in str(error.value)
            wait_for_end(reading_threads())  # they may still ask for the batches ahead
            assert server.requests - before <= 1 + 2 * reading_ahead.threads()  # each batch asks once
            server.manner = "at once"
            assert ids_of_array(hk.data.npy(url)) == [*range(2**15)]  # what was wrong is not in the cache


def ids_of_array(source):
    return np.concatenate([*GlobalBatches(source, 1024, rank=0, size=1, epochs=1)]).tolist()


@pytest.mark.full
def test_a_server_that_has_no_tags_is_asked_for_the_time(server, stored):
    server.has_tags = False
    url, path = stored[0], server.folder / "bucket" / "a.npy"
    assert ids_of_array(hk.data.npy(url)) == [*range(2**15)]
    np.save(path, np.arange(2**15) + 1)
    os.utime(path, (0, 0))
    assert ids_of_array(hk.data.npy(url)) == [*range(1, 2**15 + 1)]


def test_a_file_that_changes_under_the_run_is_named(server):
    source = hk.data.parquet(server.url("a.parquet"))
    path = server.folder / "a.parquet"
    os.utime(path, (0, 0))
    with pytest.raises(hk.DataError, match=r"a\.parquet has changed since it was listed"):
        ids(source, epochs=1)


@pytest.mark.full
def test_a_listing_that_is_not_answered_is_named(monkeypatch):
    monkeypatch.setenv("HVDKIT_DATA_TIMEOUT_SECONDS", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.parquet"
        with pytest.raises(hk.DataError, match=rf"{url} could not be listed: .*within 0\.5 s"):
            hk.data.parquet(url)


def test_patterns_and_pages_of_links(server):
    write(server.folder / "b.parquet")
    (server.folder / "notes.txt").write_text("line\n")
    for paths in ("*.parquet", "[ab].parquet", ""):
        source = hk.data.parquet(server.url(paths))
        assert (source.names, source.examples) == (["a.parquet", "b.parquet"], 2 * ROWS), paths
        assert ids(source, epochs=1) == 2 * EXPECTED, paths


@pytest.mark.full
def test_signed_urls_have_no_wildcards(server):
    os.link(server.folder / "a.parquet", server.folder / "a.parquet?key=[1]")
    assert ids(hk.data.parquet(server.url("a.parquet?key=[1]")), epochs=1) == EXPECTED


def test_arrays_are_read_in_ranges(server):
    array = np.arange(12_000, dtype=np.float32).reshape(-1, 3)
    np.save(server.folder / "a.npy", array)
    np.save(server.folder / "none.npy", array[:0])
    source = hk.data.npy([server.url("a.npy"), server.url("none.npy")])
    for order in ({}, {"shuffle_seed": 1}, {"shuffle_seed": 1, "shuffle": "blocks"}):
        options = {"rank": 0, "size": 1, "epochs": 1, **order}
        local = GlobalBatches(hk.data.npy(server.folder / "a.npy"), 100, **options)
        for mine, batch in zip(local, GlobalBatches(source, 100, **options), strict=True):
            np.testing.assert_array_equal(mine, batch, str(order))


@pytest.mark.full
def test_damaged_remote_arrays_are_named(server):
    np.save(server.folder / "a.npy", np.zeros((100, 3)))
    whole = (server.folder / "a.npy").read_bytes()
    np.save(server.folder / "columns.npy", np.zeros((3, 100)).T)
    for size in (0, 5, 9, 60, 500):
        (server.folder / f"{size}.npy").write_bytes(whole[:size])
    for name in ("0.npy", "5.npy", "9.npy", "60.npy", "500.npy", "columns.npy"):
        with pytest.raises(hk.DataError, match=rf"/{name} is not a whole"):
            hk.data.npy(server.url(name))


@pytest.mark.nightly
def test_processes_share_downloads(server, cache):
    program = f"""
import numpy as np, hvdkit as hk
from hvdkit.data.files import remote_cache
remote_cache._CHUNK = 2**14
batches = hk.data.GlobalBatches(hk.data.parquet({server.url("a.parquet")!r}), 1000, rank=0, size=1, epochs=1)
assert np.array_equal(np.concatenate([batch["id"] for batch in batches]), np.arange({ROWS}))
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert set(server.ranges.values()) == {1}


@pytest.mark.full
def test_a_stopped_process_does_not_hold_the_others(server, cache, monkeypatch):
    monkeypatch.setattr(remote_cache, "_LONGEST_TURN", 0.1)
    (cache / "locks").mkdir(parents=True)
    holder = "import fcntl, pathlib, sys; files = [open(f'{sys.argv[1]}/{i:03x}', 'wb') for i in range(4096)];"
    holder += "[fcntl.flock(file, fcntl.LOCK_EX) for file in files]; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", f"import resource; resource.setrlimit(7, (5000, 5000)); {holder}", str(cache / "locks")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        assert ids(hk.data.parquet(server.url("a.parquet"), ["id"]), epochs=1) == EXPECTED
        process.communicate(b"\n")
    assert process.returncode == 0


def test_settings_are_checked_at_the_start(server):
    for name, value in product(("HVDKIT_DATA_CACHE_GB", "HVDKIT_DATA_TIMEOUT_SECONDS"), ("abc", "-1", "nan")):
        with pytest.MonkeyPatch.context() as patch, case(name=name, value=value):
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=rf"{name}: got {value}, expected a number of at least 0"):
                hk.data.parquet(server.url("a.parquet"))


@pytest.mark.full
def test_a_cache_of_size_0_keeps_nothing(server, cache, monkeypatch):
    monkeypatch.setenv("HVDKIT_DATA_CACHE_GB", "0")
    assert ids(hk.data.parquet(server.url("a.parquet")), epochs=1) == EXPECTED
    assert not [path for path in cache.iterdir() if path.is_file()]


@pytest.mark.full
def test_a_full_disk_costs_the_cache_only(server, cache):
    program = f"""
import resource, signal
import numpy as np, hvdkit as hk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
rows = np.arange({ROWS})
assert np.array_equal(hk.data.parquet({server.url("a.parquet")!r}).read(rows)["id"], rows)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.PIPE, text=True)
    assert ended.stderr.count("data cache: cannot write") == 1
    assert not [path for path in cache.iterdir() if path.is_file()]


@pytest.mark.full
def test_a_cache_of_another_user_is_read(server, cache, monkeypatch):
    source = hk.data.parquet(server.url("a.parquet"))
    assert ids(source, epochs=1) == EXPECTED

    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    before = server.requests
    assert ids(source, epochs=1) == EXPECTED and server.requests == before


@pytest.mark.full
def test_a_cache_that_is_removed_under_the_run_is_made_again(server, cache):
    source = hk.data.parquet(server.url("a.parquet"))
    shutil.rmtree(cache)
    assert ids(source, epochs=1) == EXPECTED and [path for path in cache.iterdir() if path.is_file()]


@pytest.mark.full
def test_a_damaged_chunk_is_read_from_the_server_again(server, cache):
    source = hk.data.parquet(server.url("a.parquet"))
    assert ids(source, epochs=1) == EXPECTED
    for path in cache.iterdir():
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    assert ids(source, epochs=1) == EXPECTED


@pytest.mark.full
def test_what_killed_processes_left_is_swept(server, cache, monkeypatch):
    cache.mkdir()
    old, new = cache / f".{'a' * 32}.01234567", cache / f".{'a' * 32}.89abcdef"
    users = [cache / ".bashrc", cache / "thesis.tex"]
    for path in (old, new, *users):
        path.write_bytes(b"half")
    for path in (old, *users):
        os.utime(path, (0, time.time() - 2 * remote_cache._ABANDONED))
    remote_cache._sweep(cache)
    assert new.exists() and not old.exists()
    monkeypatch.setenv("HVDKIT_DATA_CACHE_GB", "0")
    remote_cache._sweep(cache)
    assert all(path.exists() for path in users)


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


@pytest.mark.full
def test_a_cache_that_cannot_be_written_is_left_out(server, cache, caplog):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file, not a folder")
    assert ids(hk.data.parquet(server.url("a.parquet")), epochs=1) == EXPECTED
    assert "data cache: cannot write" in caplog.text


@pytest.mark.full
def test_a_file_that_disappears_is_named(server):
    source = hk.data.parquet(server.url("a.parquet"))
    (server.folder / "a.parquet").unlink()
    with pytest.raises(hk.DataError, match=r"a\.parquet.* disappeared"):
        ids(source, epochs=1)
    with pytest.raises(ValueError, match=r"paths: got http.*c\.parquet,"):
        hk.data.parquet(server.url("c.parquet"))


@pytest.mark.full
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
        growing = hk.data.GlobalBatches(source, 16, growth="append", rank=0, size=1)
        filesystem.put(str(tmp_path / "part.parquet"), "bucket/day/hour/3.parquet")
        assert growing.add_new_files() == []
        filesystem.put(str(tmp_path / "part.parquet"), "bucket/day/3.parquet")
        assert growing.add_new_files() == ["3.parquet"]
        assert sum(growing.count for _ in growing.one_epoch()) == 4 * ROWS
    finally:
        server.stop()


@pytest.mark.full
def test_pages_of_common_servers(server):
    (server.folder / "sub").mkdir()
    write(server.folder / "sub" / "b.parquet")
    links = ("?C=M;O=A", "?C=N;O=D", "./a.parquet", "../", "sub/")
    server.page = "".join(f'<a href="{link}">{link}</a>' for link in links)
    source = hk.data.parquet(server.url(""))
    assert (source.names, source.examples) == (["a.parquet", "sub/b.parquet"], 2 * ROWS)
    assert len(listing.list_files(server.url(""))) == 2  # without a suffix, too
    server.page = server.page.replace("./a", "a")
    with pytest.raises(ValueError, match=r"paths: got .*/sub/, a folder that the pattern matches"):
        listing.list_files(server.url("*"))
    server.page = server.page.replace("sub/", "")
    assert len(listing.list_files(server.url("*"))) == 1
    server.page = "nothing"
    with pytest.raises(ValueError, match=r"paths: got http.*, expected a file, a folder with files or a pattern"):
        hk.data.parquet(server.url(""))


def test_file_systems_that_users_register_are_found():
    class Own(fsspec.AbstractFileSystem):
        protocol = "own"

    fsspec.register_implementation("own", Own, clobber=True)
    assert isinstance(filesystems.filesystem_of("own://a/b")[0], Own)
