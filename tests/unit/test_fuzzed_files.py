"""Random changes of data files, of cached offsets and of a server's answers.

Right values, or an error that names the file, in bounded memory; the file is not changed.
"""

from __future__ import annotations

import contextlib
import http.server
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.data_files import FORMATS
from helpers.forged import bounded_memory
from helpers.fuzzing import CHANGES, changed, examples
from hypothesis import example, given
from hypothesis import strategies as st

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import filesystems, remote_cache

IDS = range(60)
# Other values cannot be told from those that were written.
HAVE_CHECKSUMS = "tfrecord", "array_record"


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, Path]:
    """Return a file of each format."""
    paths = {}
    for name, (write, _, _) in FORMATS.items():
        folder = tmp_path_factory.mktemp(name)
        write(folder / "part", IDS)
        (paths[name],) = folder.iterdir()
    return paths


def read_whole(path: Path, name: str, **options) -> list:
    _, read, _ = FORMATS[name]
    return [*GlobalBatches(read(path), 16, rank=0, size=1, epochs=1, **options)]


def outcome(path: Path, name: str, **options) -> str | None:
    """Read a file; return the error, which must name it."""
    _, _, check = FORMATS[name]
    before = path.read_bytes()
    # ArrayRecord's library waits forever if its threads cannot be started, for which the limit leaves no addresses.
    with contextlib.nullcontext() if name == "array_record" else bounded_memory():
        try:
            batches = read_whole(path, name, **options)
        except (hk.DataError, ValueError, TypeError) as error:
            assert str(path) in str(error), repr(error)
            return str(error)
        finally:
            assert path.read_bytes() == before
    if name in HAVE_CHECKSUMS:
        ids = [id for batch in batches for id in check(batch).tolist()]
        assert set(ids) <= set(IDS)
    return None


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_random_changes_of_a_file_give_right_values_or_an_error_that_names_it(wholes, tmp_path_factory, name):
    @examples()
    @given(CHANGES, st.booleans(), st.sampled_from([{}, {"shuffle": "blocks", "shuffle_seed": 1}]))
    @example([(0, 0, b"\xef\xbb\xbf")], False, {})
    @example([(0, 8, b"")], True, {})
    def attack(changes, is_cut, options):
        folder = tmp_path_factory.mktemp("fuzz")
        path = folder / wholes[name].name
        path.write_bytes(changed(wholes[name].read_bytes(), changes, is_cut=is_cut))
        outcome(path, name, **options)
        shutil.rmtree(folder)

    attack()


@examples(20)
@given(CHANGES, st.booleans())
@example([(4096, 0, b"\xff" * 8)], False)
@pytest.mark.full
def test_random_changes_of_cached_offsets_change_nothing(wholes, tmp_path_factory, changes, is_cut):
    folder = tmp_path_factory.mktemp("fuzz")
    path = Path(shutil.copy(wholes["tfrecord"], folder))
    assert outcome(path, "tfrecord") is None
    (cache,) = folder.glob(".*.offsets")
    cache.write_bytes(changed(cache.read_bytes(), changes, is_cut=is_cut))
    assert outcome(path, "tfrecord") is None
    shutil.rmtree(folder)


# ---- a server that lies ----------------------------------------------------------------------------------------------


class Liar(http.server.BaseHTTPRequestHandler):
    """Serves an array; ``lies`` replace the status, headers and part of the file of answers to requests for data.

    An answer whose headers are as requested has the bytes that were requested: nothing could detect others.
    """

    content = b""
    lies: dict[str, Any] = {}  # noqa: RUF012
    heads: dict[str, str | None] = {}  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.answer(200, {"Content-Length": str(len(self.content)), "ETag": '"1"', **self.heads}, b"")

    def do_GET(self) -> None:
        first, last = 0, len(self.content) - 1
        if "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        first = max(0, first + self.lies.get("shift", 0))
        last = max(first, min(last + self.lies.get("longer", 0), len(self.content) - 1))
        body = self.content[first : last + 1]
        headers = {
            "Content-Range": f"bytes {first}-{last}/{len(self.content)}",
            "Content-Length": str(len(body)),
            "ETag": '"1"',
            **self.lies.get("headers", {}),
        }
        self.answer(self.lies.get("status", 206), headers, body)

    def answer(self, status: int, headers: dict[str, str | None], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value.encode("latin-1", "replace").decode("latin-1"))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def liar(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("served")
    np.save(folder / "a.npy", np.arange(4000))
    Liar.content = (folder / "a.npy").read_bytes()
    monkeypatch.setattr(remote_cache, "_CHUNK", 2**13)
    monkeypatch.setattr(filesystems, "LONGEST_WAIT", 0.001)
    monkeypatch.setenv("HVDKIT_DATA_TIMEOUT_SECONDS", "2")
    monkeypatch.setenv("HVDKIT_DATA_CACHE_GB", "0")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/a.npy"
        server.shutdown()


LINES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
NUMBERS = st.integers(-1, 40_000) | st.sampled_from([2**31, 2**63, 10**30])
RANGES = st.builds("bytes {}-{}/{}".format, NUMBERS, NUMBERS, NUMBERS | st.just("*"))
WRONG = {
    "status": st.sampled_from([200, 204, 206, 404, 416, 500]),
    "shift": st.integers(-9000, 9000),
    "longer": st.integers(-9000, 9000),
    "headers": st.fixed_dictionaries(
        {},
        optional={
            "Content-Range": st.none() | RANGES | LINES,
            "Content-Length": st.none() | st.integers(0, 9000).map(str) | LINES,
            "ETag": st.none() | LINES,
            "Content-Encoding": st.sampled_from(["gzip", "br", "identity", "x"]),
        },
    ),
}
HEADS = {"Content-Length": st.none() | NUMBERS.map(str) | LINES, "ETag": st.none() | LINES}


@pytest.mark.full
@examples(10)
@given(st.fixed_dictionaries({}, optional=WRONG), st.fixed_dictionaries({}, optional=HEADS))
@example({"shift": -64}, {})
@example({"shift": -(10**6)}, {})
@example({"headers": {"ETag": '"2"'}}, {})
@example({"status": 200}, {})
@example({}, {"Content-Length": "1" + "0" * 30})
def test_a_server_that_lies_gives_right_values_or_an_error_that_names_the_url(liar, lies, heads):
    Liar.lies, Liar.heads = lies, heads
    claimed = lies.get("headers", {}).get("Content-Range")
    with bounded_memory():
        try:
            batches = [*GlobalBatches(hk.data.npy(liar), 500, rank=0, size=1, epochs=1)]
        except (hk.DataError, ValueError) as error:
            assert liar in str(error), repr(error)
            return
    if claimed is None or not lies.get("shift"):
        assert np.concatenate(batches).tolist() == [*range(4000)]
