"""What paths stand for: regular files only; no tables with a transaction log."""

import json
import os
import resource
import shutil
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hvdkit as hk
from hvdkit.data.files import remote_cache, storage
from hvdkit.data.files.filesystems import filesystem_of
from hvdkit.data.files.listing import list_files

COLUMNS = {"x": "int64"}


def write(path, rows=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": np.arange(rows)}), path)


# ---- tables of Delta Lake, Hudi and Iceberg --------------------------------------------------------------------------


def write_table(folder, name):
    """Write the files of a table with the layout of its format; return the folder and a part of it."""
    part = folder / "year=2024" if name != "Iceberg" else folder / "data" / "year=2024"
    write(part / "part-0.parquet")
    write(part / "part-1.parquet")
    log = {
        "Delta Lake": folder / "_delta_log" / "00000000000000000000.json",
        "Hudi": folder / ".hoodie" / "20240101.commit",
        "Iceberg": folder / "metadata" / "v1.metadata.json",
    }[name]
    log.parent.mkdir()
    log.write_text("{}")
    return part


@pytest.mark.parametrize("name", ["Delta Lake", "Hudi", "Iceberg"])
def test_tables_are_refused_by_name(tmp_path, name):
    part = write_table(tmp_path / "lake" / "clicks", name)
    folder = tmp_path / "lake" / "clicks"
    for paths in (
        folder,
        tmp_path / "lake",
        part,
        f"{folder}/*/*.parquet" if name != "Iceberg" else f"{folder}/*/*/*.parquet",
        f"{tmp_path}/lake/**/*.parquet",
        f"{tmp_path}/lake/clicks/**",
        f"{part}/*.parquet",
        f"{part}/part-[01].parquet",
    ):
        with pytest.raises(ValueError, match=rf"paths: got {folder}, a table of {name}, expected .*export its present"):
            hk.data.parquet(paths)
    files = sorted(part.iterdir())  # as the table's own library lists them
    assert hk.data.parquet(files).examples == 8
    assert hk.data.parquet(f"file://{files[0]}").examples == 4


def test_folders_whose_names_are_those_of_a_log_are_no_tables(tmp_path):
    write(tmp_path / "data" / "a.parquet")
    write(tmp_path / "metadata" / "b.parquet")
    (tmp_path / "metadata" / "notes.json").write_text("{}")
    (tmp_path / "_delta_log").mkdir()  # empty
    for paths in (tmp_path, f"{tmp_path}/*/*.parquet"):
        assert hk.data.parquet(paths).examples == 8
    assert hk.data.parquet(tmp_path / "data").examples == 4


def test_a_table_in_a_store_is_refused():
    import fsspec

    store = fsspec.filesystem("memory")
    try:
        for name, text in (("part-0.parquet", b"PAR1"), ("_delta_log/0.json", json.dumps({}).encode())):
            store.pipe_file(f"/bucket/clicks/{name}", text)
        for paths in ("memory://bucket/clicks", "memory://bucket/clicks/*.parquet", "memory://bucket"):
            with pytest.raises(ValueError, match=r"paths: got /bucket/clicks, a table of Delta Lake"):
                hk.data.parquet(paths)
    finally:
        store.rm("/bucket", recursive=True)


# ---- what is no regular file -----------------------------------------------------------------------------------------


def test_what_matches_and_is_no_regular_file_is_named(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.parquet")

    def fifo(path):
        os.mkfifo(path)

    def listening(path):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))

    def device(path):
        path.symlink_to("/dev/zero")

    def folder(path):
        path.mkdir()
        write(path / "part.parquet")

    odd = tmp_path / "b2.parquet"
    for make, kind in ((fifo, "a FIFO"), (listening, "a socket"), (device, "a device"), (folder, "a folder that the")):
        make(odd)
        for paths in (tmp_path, f"{tmp_path}/*.parquet", f"{tmp_path}/b*", [tmp_path / "a.parquet", odd]):
            if make is folder and isinstance(paths, list | os.PathLike):
                assert hk.data.parquet(paths).examples == (8 if isinstance(paths, list) else 16)
                continue
            with pytest.raises(ValueError, match=rf"paths: got {odd}, {kind}.*expected regular files"):
                hk.data.parquet(paths)
        if odd.is_dir():
            assert hk.data.parquet(f"{tmp_path}/**/*.parquet").examples == 16
            shutil.rmtree(odd)
        else:
            odd.unlink()
    os.mkfifo(tmp_path / "control")  # has not the name of a data file
    assert hk.data.parquet(tmp_path).examples == 12
    os.mkfifo(tmp_path / "_b.parquet")
    assert hk.data.parquet(f"{tmp_path}/*.parquet").examples == 12


def test_a_file_that_becomes_a_fifo_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "CHECK_SECONDS", 0)
    path = tmp_path / "a.csv"
    path.write_text("1\n2\n")
    source = hk.data.delimited(path, COLUMNS)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(hk.DataError, match=r"a\.csv is no longer a regular file, but a FIFO"):
        source.read(np.array([0, 1]))


def cache_of(folder):
    (found,) = folder.glob(".*.offsets")
    return found


def test_offsets_that_are_no_regular_file_are_replaced(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1\n2\n")
    assert hk.data.delimited(path, COLUMNS).examples == 2
    cache = cache_of(tmp_path)
    good = cache.read_bytes()
    for make in (os.mkfifo, lambda name: name.symlink_to("/dev/zero")):
        cache.unlink()
        make(cache)
        assert hk.data.delimited(path, COLUMNS).examples == 2
        assert cache.read_bytes() == good
    cache.unlink()
    cache.mkdir()  # cannot be replaced
    assert hk.data.delimited(path, COLUMNS).examples == 2


def test_chunks_and_locks_that_are_no_regular_files_are_passed_over(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("HVDKIT_DATA_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.pipe_file("/a.csv", b"1\n2\n")
    try:
        assert hk.data.delimited("memory://a.csv", COLUMNS).examples == 2
        (chunk,) = [path for path in (tmp_path / "cache").iterdir() if path.is_file()]
        (lock,) = (tmp_path / "cache" / "locks").iterdir()
        (file,) = list_files("memory://a.csv")
        filesystem, name = filesystem_of(file.url)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            for path in (chunk, lock):
                path.unlink()
                make(path)
            assert remote_cache.read(filesystem, name, file, 0, 4) == b"1\n2\n"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB
    finally:
        store.rm("/a.csv")
