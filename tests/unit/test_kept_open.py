"""Files that stay open between reads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import storage
from hvdkit.data.files.listing import list_files
from hvdkit.data.files.storage import opened


def open_files(folder: Path) -> int:
    links = [*Path("/proc/self/fd").iterdir()]
    return sum(str(folder) in str(link.readlink()) for link in links if link.is_symlink())


def test_the_number_of_open_files_is_bounded(tmp_path):
    for i in range(2 * storage.MOST_OPEN):
        np.save(tmp_path / f"{i:03}.npy", np.arange(4 * i, 4 * i + 4))
    files = list_files(tmp_path)

    def read(number: int) -> bytes:
        with opened(files[number]) as file:
            return file.read(files[number].size - 32, 32)

    with ThreadPoolExecutor(8) as executor:
        found = [*executor.map(read, [*range(len(files))] * 5)]
    assert [int(np.frombuffer(data, np.int64)[0]) for data in found] == [*range(0, 4 * len(files), 4)] * 5
    assert 0 < open_files(tmp_path) <= storage.MOST_OPEN


def test_a_file_is_lent_to_one_thread_at_a_time_and_kept(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (file,) = list_files(tmp_path)
    with opened(file) as first, opened(file) as second:
        assert first is not second
    with opened(file) as again:
        assert again in (first, second)


def test_a_file_that_failed_is_closed(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (file,) = list_files(tmp_path)
    for _ in range(3):
        try:
            with opened(file) as each:
                each.read(0, 9)
        except hk.DataError:
            continue
        raise AssertionError("read beyond the end")
    assert open_files(tmp_path) == 0


def test_ranks_read_their_part_of_array_records_once(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "a"), "group_size:1")
    for i in range(20_000):
        writer.write(i.to_bytes(100, "little"))
    writer.close()
    source = hk.data.array_record(tmp_path / "a")
    for seed in (None, 0):
        before = psutil.Process().io_counters().read_chars
        batches = [*GlobalBatches(source, 1000, shuffle_seed=seed, rank=1, size=2, epochs=1)]
        read = psutil.Process().io_counters().read_chars - before
        assert sum(map(len, batches)) == 10_000
        assert read < 1.2 * (tmp_path / "a").stat().st_size / 2 + 2**20  # the index, at most once


def test_idle_files_may_be_closed_while_the_lock_is_held(tmp_path):
    """Memory is collected at any time: an abandoned epoch may end in a thread that holds the lock."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"abc")
    first, second = list_files(tmp_path)
    for file in (first, second):
        with opened(file) as each:
            each.read(0, 3)
    with storage._lock:
        storage.close_idle()
        assert open_files(tmp_path) == 2
    with opened(first) as each:
        assert each.read(0, 3) == b"abc" and open_files(tmp_path) == 1


def test_files_are_closed_when_an_epoch_ends(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.arange(20))
    batches = GlobalBatches(hk.data.npy(tmp_path), 4, epochs=2, rank=0, size=1)
    next(batches)
    assert open_files(tmp_path) > 0
    assert len(list(batches)) == 29
    assert open_files(tmp_path) == 0


def test_parquet_files_are_closed_after_an_epoch_and_if_they_are_damaged(tmp_path):
    for i in range(5):
        pq.write_table(pa.table({"x": np.arange(8)}), tmp_path / f"{i}.parquet")
    for _ in range(2):
        assert sum(1 for _ in GlobalBatches(hk.data.parquet(tmp_path), 4, epochs=1, rank=0, size=1)) == 10
    assert open_files(tmp_path) == 0
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(hk.HvdkitError, match="is not a whole Parquet file"):
        GlobalBatches(hk.data.parquet(tmp_path), 4, epochs=1, rank=0, size=1)
    for path in tmp_path.iterdir():
        path.unlink()
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(hk.HvdkitError, match="is not a whole"):
        GlobalBatches(hk.data.npy(tmp_path / "a.npy"), 4, epochs=1, rank=0, size=1)
    assert open_files(tmp_path) == 0
