"""Bad files: each is an error that names the file, and usually the record, or is skipped and counted."""

import bz2
import gzip
import json
import lzma
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import xxhash
from helpers.data_files import COLUMNS, FORMATS, damage, write_tfrecord
from helpers.tiers import after_core

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import offsets, records, storage, tfrecord_format
from hvdkit.data.files.listing import list_files

TWO = {"id": "int64", "x": "int64"}
LINES = "delimited", "criteo"
HAVE_CHECKSUMS = "tfrecord", "array_record"


def read_whole(source, **options):
    return [*GlobalBatches(source, 16, rank=0, size=1, epochs=1, **options)]


def ids_of(batches, check):
    return np.concatenate([check(batch) for batch in batches]).tolist()


def written(folder, name, ids=range(100)):
    """Write a file of the format, and return its path."""
    FORMATS[name][0](folder / "part", ids)
    (path,) = [each for each in folder.iterdir() if not each.name.startswith(".")]
    return path


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_was_cut_anywhere_is_named(name, tmp_path):
    path, (_, read, check) = written(tmp_path, name), FORMATS[name]
    whole = path.read_bytes()
    places = {0, 1, 7, 11, 12, 13, len(whole) // 2, len(whole) - 1, len(whole) - 4, len(whole) - 5, len(whole) - 8}
    for size in sorted(places | set(random.Random(0).sample(range(len(whole)), 12))):
        path.write_bytes(whole[:size])
        try:
            found = ids_of(read_whole(read(tmp_path)), check)
        except hk.DataError as error:
            assert path.name in str(error)
        except ValueError as error:
            assert "without rows" in str(error) and str(path) in str(error)
        except AssertionError:
            assert name in LINES  # the last value was cut, which nothing can detect
        else:
            assert name in LINES and set(found) <= set(range(100))


@pytest.mark.parametrize("name", after_core(FORMATS, but=["tfrecord", "delimited"]))
def test_flipped_bits_are_named_or_harmless(name, tmp_path):
    path, (_, read, check) = written(tmp_path, name), FORMATS[name]
    whole, draw = path.read_bytes(), random.Random(1)
    ends = [*range(16), *(len(whole) - back for back in (1, 2, 4, 5, 6, 8, 12, 40, 200, 400))]
    for place in [*ends, *draw.sample(range(len(whole)), 20)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            ids_of(read_whole(read(tmp_path), shuffle="blocks", interleave=1), check)
        except (hk.DataError, ValueError, KeyError, TypeError) as error:
            assert path.name in str(error) or isinstance(error, KeyError)  # a column's name may be damaged
        except AssertionError:
            assert name not in HAVE_CHECKSUMS


def test_checksums_of_parquet_pages_are_verified(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": np.arange(1000)}), path, compression="none", write_page_checksum=True)
    place = path.read_bytes().index(np.int64(500).tobytes())
    damage(path, place)
    with pytest.raises(hk.DataError, match=r"row group 0 of .*a\.parquet is damaged"):
        hk.data.parquet(path)


def test_damage_in_the_middle_of_runs_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", 1000)
    write_tfrecord(tmp_path / "a", range(200))
    starts = tfrecord_format.TFRecordFormat(None)._offsets_of(list_files(tmp_path)[0])
    bad = [0, 1, 17, 100, 199]
    for record in bad:
        damage(tmp_path / "a", int(starts[record]) + 13)
    source = hk.data.tfrecord(tmp_path / "a", on_error="skip")
    assert source.layouts[0].damaged.tolist() == bad and source.examples == 195


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 1}])
def test_a_row_that_cannot_be_parsed_is_named(tmp_path, options):
    (tmp_path / "1.csv").write_text("id,x\n1,2\n")
    (tmp_path / "2.csv").write_text("id,x\n" + "3,4\n" * 20 + "5\n" + "5,x\n" + "6,7\n" * 20)
    source = hk.data.delimited(tmp_path, TWO, header_lines=1, on_error="skip")
    with pytest.raises(hk.DataError, match=r"line 23 of .*2\.csv cannot be parsed: .*'x'"):
        read_whole(source, **options)
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as file:
        file.write(tf.train.Example().SerializeToString())
        file.write(b"not an example")
    features = {"id": tf.io.FixedLenFeature([], tf.int64, default_value=0)}
    with pytest.raises(hk.DataError, match=r"a: row 1 .* cannot be parsed"):
        read_whole(hk.data.tfrecord(tmp_path / "a", features), **options)


def test_a_missing_value_names_the_row_and_the_remedy(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n3,\n")
    with pytest.raises(hk.DataError, match=r"line 2 of .*a\.csv .*column 'x': got int64 with 1 missing.*fill="):
        read_whole(hk.data.delimited(tmp_path / "a.csv", TWO))


# ---- what is no data -------------------------------------------------------------------------------------------------


def test_text_from_data_files_is_escaped(tmp_path):
    """Values, names of columns and names of files may contain commands for the terminal."""
    evil = "\x1b]0;title\x07\x9b31m\u202e"
    name = f"{evil}\n[rank 0] intact\r\t\x85\u2028"
    (tmp_path / "value.csv").write_text(f"1,2\n3,4{evil}\n")
    (tmp_path / "clicks.tsv").write_text("\t".join([f"1{evil}", *["5"] * 13, *["ab"] * 26]) + "\n")
    (tmp_path / f"name{name}.csv").write_text("1,x\n")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({f"b{name}": ["x"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"c": [{f"d{name}": 1}]}), tmp_path / "c.parquet")
    numbers = {"a": np.int64, "b": np.int64}
    for read in (
        lambda: hk.data.delimited(tmp_path / "value.csv", numbers),
        lambda: hk.data.criteo(tmp_path / "clicks.tsv"),
        lambda: hk.data.delimited(tmp_path / f"name{name}.csv", numbers),
        lambda: hk.data.npy(tmp_path / f"missing{name}.npy"),
        lambda: hk.data.parquet([tmp_path / "a.parquet", tmp_path / "b.parquet"]),
        lambda: hk.data.parquet(tmp_path / "c.parquet"),
    ):
        with pytest.raises((hk.DataError, ValueError, TypeError)) as error:
            [*GlobalBatches(read(), 4, rank=0, size=1, epochs=1)]
        message = str(error.value)
        assert message.isprintable() and r"\x1b]0;title\x07\x9b31m\u202e" in message, message


def test_files_without_rows_are_named(tmp_path):
    for text in ("", "id,x\n", "id,x"):
        (tmp_path / "a.csv").write_text(text)
        for lines in (1, 3):
            with pytest.raises(ValueError, match=r"without rows, from .*a\.csv"):
                hk.data.delimited(tmp_path / "a.csv", TWO, header_lines=lines)
    (tmp_path / "b.csv").write_text("id,x\n1,2\n")
    assert hk.data.delimited(tmp_path, TWO, header_lines=1).examples == 1
    np.save(tmp_path / "none.npy", np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"without rows, from .*none\.npy"):
        hk.data.npy(tmp_path / "none.npy")


def test_a_folder_of_hidden_files_has_none(tmp_path):
    for name in (".a.csv", "_SUCCESS"):
        (tmp_path / name).write_text("1,2\n")
    with pytest.raises(ValueError, match="paths: got"):
        hk.data.delimited(tmp_path, TWO)


NAMES = ["a b", "a[1]", "é ü", "day=1", "new\nline", "what?", "st*r", "a::b", "#", "%20", "-x", "l" * 250]
NAMES.append(os.fsdecode(b"\xff"))


@pytest.mark.parametrize("name", NAMES)
def test_unusual_names(name, tmp_path):
    (tmp_path / name).write_text("1,2\n3,4\n")
    for _ in range(2):
        for paths in (tmp_path / name, tmp_path, f"{tmp_path}/", f"{tmp_path}/*"):
            assert hk.data.delimited(paths, TWO).examples == 2


def test_links_are_followed_to_files(tmp_path):
    data, links = tmp_path / "data", tmp_path / "links"
    data.mkdir()
    links.mkdir()
    (data / "a.csv").write_text("1,2\n3,4\n")
    (links / "a.csv").symlink_to(data / "a.csv")
    for paths in (links, links / "a.csv", f"{links}/*"):
        assert len(read_whole(hk.data.delimited(paths, TWO))) == 1
    (links / "loop").symlink_to(links)
    with pytest.raises(ValueError, match=r"loop, a link to a folder"):
        hk.data.delimited(links, TWO)
    (links / "loop").unlink()
    (links / "b.csv").symlink_to(data / "missing")
    with pytest.raises(hk.DataError, match=r"links could not be listed: .*b\.csv"):
        hk.data.delimited(links, TWO)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "pipe", tmp_path / "socket", "/dev/null", "", tmp_path):
        with pytest.raises(ValueError, match="paths: got"):
            hk.data.delimited(path, TWO)


@pytest.fixture
def shown_folder():
    """Return a folder that all users may open; pytest's are for one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_an_unreadable_file_is_named(shown_folder):
    folder = shown_folder
    (folder / "a.csv").write_text("1,2\n")
    (folder / "a.csv").chmod(0)
    (folder / "b.csv").write_text("1,2\n")
    drop = "os.setgroups([]); os.setgid(65534); os.setuid(65534)" if os.geteuid() == 0 else ""
    program = f"""
import os
import hvdkit as hk
read = lambda name: hk.data.delimited({str(folder)!r} + name, {TWO!r})
read("/b.csv")  # imports all that is needed
{drop}
read("/a.csv")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "DataError" in ended.stderr and "a.csv cannot be opened" in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("gzip", gzip.compress),
        ("bzip2", bz2.compress),
        ("bzip2", lambda data: bz2.compress(data, 1)),
        ("xz", lzma.compress),
    ],
)
def test_compressed_files_have_a_remedy(name, compress, tmp_path):
    (tmp_path / "a").write_bytes(compress(b"1,2\n" * 100))
    for read in (hk.data.tfrecord, hk.data.criteo, lambda path: hk.data.delimited(path, TWO)):
        with pytest.raises(hk.DataError, match=rf"a is compressed with {name}, .*decompress it with"):
            read(tmp_path / "a")


def test_records_that_are_compressed_with_zlib_have_a_remedy(tmp_path):
    for level in (0, 1, 6, 9):
        options = tf.io.TFRecordOptions(compression_type="ZLIB", compression_level=level)
        with tf.io.TFRecordWriter(str(tmp_path / "a"), options) as file:
            file.write(b"record" * 1000)
        for on_error in ("raise", "skip"):
            with pytest.raises((hk.DataError, ValueError), match=r"a") as error:
                hk.data.tfrecord(tmp_path / "a", on_error=on_error)
            assert on_error == "skip" or "a is compressed with zlib, " in str(error.value)
    (tmp_path / "a").write_bytes(b"x^2 is a parabola\n" * 10)
    with pytest.raises(hk.DataError, match=r"a: record 0, .* has a damaged length"):
        hk.data.tfrecord(tmp_path / "a")


def test_arrays_of_other_kinds_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    for name, text in (("a.npz", "archive"), ("objects.npy", "objects")):
        with pytest.raises(hk.DataError, match=rf"{name} .*{text}"):
            hk.data.npy(tmp_path / name)


def write_header(path, text, data=b"", version=1):
    """Write a .npy file with a header of any text."""
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + data)


def test_headers_of_arrays_are_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_DATA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.npy"
    store = fsspec.filesystem("memory")
    shapes = ("(2**70,)", f"({2**70},)", f"({2**60}, 0)", f"(0, {2**70})", f"(1, 0, {2**40})", "(-1,)", "(-2, -3)", "5")
    shapes += (f"({2**32}, {2**32})", "(" + "1, " * 200 + ")", "(2, 'x')")
    texts = [f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}" for shape in shapes]
    texts += [f"{{'descr': {each}, 'fortran_order': False, 'shape': (2,)}}" for each in ("'V0'", "'|O'", "'%%'", "[]")]
    texts += ["", "{", "{}", "[" * 5000, "{'descr': '<f8'}", "{[]: 1}", "\xff", "\0", "-" * 9000 + "1", "1 if 2 else"]
    headers = [(text.encode("latin1"), version) for text in texts for version in (1, 2)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for text, version in [*headers, (b"", 2)]:
            write_header(path, text, bytes(32), version)
            if text == b"":  # a length of 4 GB
                path.write_bytes(b"\x93NUMPY\x02\x00" + b"\xff" * 4 + bytes(32))
            store.pipe_file("/a.npy", path.read_bytes())
            for url in (path, "memory://a.npy"):
                with pytest.raises(hk.DataError, match=r"a\.npy (is not a whole|claims|has a single value)"):
                    hk.data.npy(url)
    finally:
        store.rm("/a.npy")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def test_a_footer_that_claims_other_rows_is_named(tmp_path):
    pq.write_table(pa.table({"x": np.arange(7)}), tmp_path / "a.parquet", row_group_size=1)
    whole = (tmp_path / "a.parquet").read_bytes()
    for old, new in ((b"\x16\x02", b"\x16\x04"), (b"\x16\x02", b"\x16\x01")):  # num_rows of a group: 1, then 2 or -1
        damaged = 0
        for place in [i for i in range(len(whole)) if whole.startswith(old, i)]:
            (tmp_path / "a.parquet").write_bytes(whole[:place] + new + whole[place + 2 :])
            try:
                source = hk.data.parquet(tmp_path)
                assert source.read(np.arange(source.examples))["x"].tolist() == [*range(7)]
            except hk.DataError as error:
                assert "a.parquet" in str(error)
                damaged += "footer claims 2" in str(error) or "claims to have -1 rows" in str(error)
        assert damaged


def test_cached_offsets_are_not_trusted(tmp_path):
    path = written(tmp_path, "delimited", range(50))
    FORMATS["delimited"][1](path)
    cache = cache_of(tmp_path)
    good = cache.read_bytes()
    header = json.loads(good[:4096])
    whole = np.frombuffer(good[4096:], "<u8")
    for forged in (whole * 2**50, whole[::-1], np.append(whole[:-1], 2**63).astype("<u8")):
        header["checksum"] = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(forged).data)
        cache.write_bytes(json.dumps(header).encode().ljust(4095) + b"\n" + forged.tobytes())
        assert FORMATS["delimited"][1](path).examples == 50
        assert cache.read_bytes() == good
    os.truncate(cache, 2**40)  # to read it all would take minutes
    assert FORMATS["delimited"][1](path).examples == 50
    assert cache.read_bytes() == good


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"columns": ["id"]}, TypeError),
        ({"columns": {}}, TypeError),
        ({"delimiter": ""}, ValueError),
        ({"delimiter": "ab"}, ValueError),
        ({"delimiter": 9}, ValueError),
        ({"header_lines": -1}, ValueError),
        ({"fill": {"y": 0}}, ValueError),
    ],
)
def test_arguments_are_checked(options, error, tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n")
    with pytest.raises(error, match=f"{next(iter(options))}: got"):
        hk.data.delimited(tmp_path / "a.csv", **{"columns": TWO, **options})
    with pytest.raises(TypeError, match="columns: got id"):
        hk.data.parquet(tmp_path / "a.csv", "id")


# ---- files that change under the run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parquet", "tfrecord", "delimited", "npy", "array_record"])
@pytest.mark.parametrize("change", ["grown", "replaced", "deleted"])
def test_a_change_in_the_middle_of_an_epoch_is_an_error(name, change, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "CHECK_SECONDS", 0)
    paths = [tmp_path / each for each in "ab"]
    write, read, _ = FORMATS[name]
    for number, path in enumerate(paths):
        write(path, range(1000 * number, 1000 * (number + 1)))
    path = sorted(each for each in tmp_path.iterdir() if each.name.startswith("b") and each.suffix != ".offsets")[0]
    batches = GlobalBatches(read(tmp_path), 16, rank=0, size=1)
    next(batches)
    content = path.read_bytes()
    if change == "deleted":
        path.unlink()
    else:
        path.with_name("_other").write_bytes(content + content[-40:] * (change == "grown"))
        path.with_name("_other").replace(path)
    with pytest.raises(hk.DataError, match=rf"{path.name} has (changed|disappeared) since it was listed"):
        for _ in range(130):
            next(batches)


@pytest.mark.parametrize("array", [np.random.rand(10_000, 8), np.asfortranarray(np.random.rand(10_000, 8))])
@pytest.mark.parametrize("seed", [None, 1])
def test_an_array_that_is_cut_under_the_run_is_named(tmp_path, array, seed):
    np.save(tmp_path / "a.npy", array)
    batches = GlobalBatches(hk.data.npy(tmp_path), 64, shuffle_seed=seed, rank=0, size=1)  # the file stays open
    os.truncate(tmp_path / "a.npy", 5000)  # reading a map beyond the end would be a SIGBUS
    with pytest.raises(hk.DataError, match=r"a\.npy (ends at byte|has changed|is not a whole)"):
        for _ in batches:
            pass


# ---- the cache of offsets --------------------------------------------------------------------------------------------


def cache_of(folder):
    (cache,) = [each for each in folder.iterdir() if each.name.endswith(".offsets")]
    return cache


def test_a_file_with_an_old_time_does_not_get_old_offsets(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("11,2\n3,4\n")
    status = path.stat()
    source = hk.data.delimited(path, TWO)
    assert source.examples == 2
    path.write_text("1,2\n33,4\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (batch,) = GlobalBatches(hk.data.delimited(path, TWO), 2, rank=0, size=1, epochs=1)
    assert batch["id"].tolist() == [1, 33]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]" + b" " * 5000, b"\xff" * 9000, b'{"version": 9}'.ljust(4103), b"[" * 4096 + b" " * 8]
)
def test_a_damaged_cache_is_replaced(tmp_path, content):
    path = written(tmp_path, "delimited")
    FORMATS["delimited"][1](path)
    good = cache_of(tmp_path).read_bytes()
    cache_of(tmp_path).write_bytes(content)
    assert FORMATS["delimited"][1](path).examples == 100
    assert cache_of(tmp_path).read_bytes() == good


def test_a_cache_of_another_version_is_replaced(tmp_path):
    path = written(tmp_path, "delimited")
    FORMATS["delimited"][1](path)
    good = cache_of(tmp_path).read_bytes()
    header = {**json.loads(good[:4096]), "version": 1}
    cache_of(tmp_path).write_bytes(json.dumps(header).encode().ljust(4095) + b"\n" + good[4096:])
    assert FORMATS["delimited"][1](path).examples == 100
    assert cache_of(tmp_path).read_bytes() == good


def test_several_writers_at_once(tmp_path):
    path, found = written(tmp_path, "delimited", range(5000)), []
    open_source = lambda: found.append(FORMATS["delimited"][1](path).examples)  # noqa: E731
    threads = [threading.Thread(target=open_source) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5000] * 8
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, cache_of(tmp_path).name])


@pytest.mark.full
def test_a_disk_that_is_full_costs_the_cache_only(tmp_path):
    path = written(tmp_path, "delimited", range(5000))
    program = f"""
import resource, signal, sys
import numpy as np
import hvdkit as hk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
source = hk.data.delimited({str(path)!r}, {COLUMNS!r}, header_lines=1)
assert source.read(np.array([4999]))["id"] == 4999
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "user")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [path.name]


def test_what_a_killed_process_left_is_removed(tmp_path):
    path = written(tmp_path, "delimited")
    FORMATS["delimited"][1](path)
    cache = cache_of(tmp_path)
    old, new = cache.with_name(f"{cache.name}.0123abcd"), cache.with_name(f"{cache.name}.4567abcd")
    users = tmp_path / "kafka.offsets.parquet"
    for left in (old, new, users):
        left.write_bytes(b"half")
    for left in (old, users):
        os.utime(left, (0, time.time() - 2 * offsets._ABANDONED))
    cache.unlink()
    offsets._sweep.cache_clear()
    assert FORMATS["delimited"][1](path).examples == 100
    assert cache.exists() and new.exists() and users.exists() and not old.exists()


# ---- many files ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("large", [2**18, 0])
def test_many_files_need_few_descriptors(tmp_path, large, monkeypatch):
    monkeypatch.setattr(offsets, "_LARGE_CACHE", large)
    monkeypatch.setattr(records, "_MOST_MAPS", 50)
    monkeypatch.setattr(storage, "MOST_OPEN", 20)
    storage.close_idle()
    for number in range(300):
        (tmp_path / f"{number}.csv").write_text(f"{number},1\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], highest + 120), limits[1]))
    try:
        source = hk.data.delimited(tmp_path, TWO)
        assert len(read_whole(source, shuffle_seed=1)) == 19
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_offsets_in_memory_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_MOST_OFFSET_BYTES", 1000)
    for number in range(40):
        lines = [f"{number * 10 + i},1\n" for i in range(10)]
        (tmp_path / f"{number:02}.csv").write_text("".join(lines))
    source = hk.data.delimited(tmp_path, TWO)
    kept = source._format._offsets
    assert 0 < sum(each.nbytes for each in kept.values()) == source._format._offset_bytes <= 1000
    found = np.concatenate([batch["id"] for batch in read_whole(source, shuffle_seed=1)])
    assert sorted(found.tolist()) == [*range(400)]
    assert 0 < sum(each.nbytes for each in kept.values()) == source._format._offset_bytes <= 1000


def test_paths_may_be_a_generator(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.csv").write_text(f"{number},1\n")
    source = hk.data.delimited((tmp_path / f"{number}.csv" for number in (2, 0, 1)), TWO)
    assert source.names == ["2.csv", "0.csv", "1.csv"] == source.listed_again().names


@pytest.mark.parametrize("paths", [None, 5])
def test_paths_of_another_type_are_an_error(paths):
    with pytest.raises(TypeError, match=r"^paths: got (None|5), expected paths, or a sequence of them; pass e\.g\."):
        hk.data.delimited(paths, TWO)
