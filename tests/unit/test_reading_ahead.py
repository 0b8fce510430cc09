"""Threads that read ahead: what they keep, and that they end."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import case
from helpers.data_files import block_order, reading_threads, wait_for_end
from helpers.speed import WAIT

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import source as source_module
from hvdkit.data.files.parquet_format import ParquetFormat
from hvdkit.data.files.reading_ahead import BlockCache

BLOCKS = {"shuffle_seed": 0, "shuffle": "blocks", "shuffle_buffer": 400, "interleave": 4}


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        ids = np.arange(number * 1000, number * 1000 + 1000)
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{number}.parquet", row_group_size=100)
    return tmp_path


def test_blocks_are_read_once_and_kept_within_a_window():
    n, batch_size, lanes = 12_000, 40, 4
    for block, window in ((100, 100), (100, 250), (50, 120), (300, 90)):
        starts = np.arange(0, n + 1, block)
        order = block_order(starts, batch_size, lanes, window, seed=1)(np.arange(n))
        loaded, most = [], 0
        cache = BlockCache(loaded.append, np.diff(starts))
        for batch in order.reshape(-1, batch_size):
            for number, rows in zip(*np.unique(batch // block, return_counts=True), strict=True):
                cache.get(int(number), int(rows))
            cache.next_batch()
            most = max(most, len(cache))
        with case(block=block, window=window):
            assert sorted(loaded) == list(range(len(starts) - 1))
            assert most <= lanes * (window // block + 2)
            assert len(cache) == 0


@pytest.mark.parametrize(("kept", "loads"), [(2**30, 40), (1, None)])
def test_small_files_are_kept_in_memory_by_a_full_shuffle(folder, kept, loads, monkeypatch, caplog):
    monkeypatch.setattr(source_module, "_SMALL_BYTES", kept)
    source, loaded, load = hk.data.parquet(folder), [], ParquetFormat.load
    monkeypatch.setattr(ParquetFormat, "load", lambda *each: loaded.append(each[-1]) or load(*each))
    batches = GlobalBatches(source, 200, shuffle_seed=0, epochs=1, rank=0, size=1)
    assert sorted(i for batch in batches for i in batch["id"].tolist()) == [*range(4000)]
    assert len(loaded) == loads if loads else len(loaded) > 400
    assert ("reads about 100 times its part of the files" in caplog.text) == (loads is None)


def test_a_block_that_cannot_be_read_is_read_again():
    calls = []

    def load(block):
        calls.append(block)
        if len(calls) == 1:
            raise OSError("once")
        return block

    cache = BlockCache(load, np.array([2]))
    with pytest.raises(OSError, match="once"):
        cache.get(0, 1)
    assert cache.get(0, 1) == 0


@pytest.mark.full
def test_threads_of_abandoned_epochs_end(folder):
    source = hk.data.parquet(folder)
    before, started = set(threading.enumerate()), set()
    for _ in range(100):
        batches = GlobalBatches(source, 100, rank=0, size=1, **BLOCKS)
        next(batches.one_epoch())
        started |= set(reading_threads()) - before
    assert started
    del batches
    gc.collect()
    wait_for_end(started)


def test_threads_of_an_abandoned_pass_end(folder):
    source = hk.data.parquet(folder).map(lambda batch: (batch["id"], batch["id"]))
    before = set(threading.enumerate())
    dataset = GlobalBatches(source, 100, rank=0, size=1, remainder="drop", **BLOCKS).as_keras()
    for _ in range(8):
        next(iter(dataset))
    started = set(reading_threads()) - before
    assert started
    del dataset
    gc.collect()
    wait_for_end(started)


def test_no_file_stays_open_after_an_abandoned_epoch(tmp_path):
    for number in range(8):
        np.save(tmp_path / f"{number}.npy", np.arange(3000.0) + number * 3000)
    others = {*reading_threads()}  # of tests whose iterators still exist
    batches = GlobalBatches(hk.data.npy(tmp_path), 256, shuffle_seed=1, rank=0, size=1)
    next(batches)
    threads = {*reading_threads()} - others
    assert threads
    del batches
    gc.collect()
    wait_for_end(threads)
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if tmp_path in link.parents]


PROGRAM = """
import os, signal, sys, threading, time
import hvdkit as hk

def slow(batch):
    if batch["id"][0] >= 200:  # not the first batch, whichever thread is faster
        is_reading.set()
        may_end.wait()  # a disk that does not answer
    return batch

is_reading, may_end = threading.Event(), threading.Event()
source = hk.data.parquet(sys.argv[1]).map(slow)
batches = hk.data.GlobalBatches(source, 100, rank=0, size=1)
next(batches)
is_reading.wait()
"""
INTERRUPTED = """
def interrupt():
    frame = None
    while frame is None or frame.f_code.co_name != "result":  # until the main thread waits for a batch
        time.sleep(0.01)
        frame = sys._current_frames()[threading.main_thread().ident].f_back
    os.kill(os.getpid(), signal.SIGINT)

try:
    threading.Thread(target=interrupt).start()
    for _ in batches:
        pass
except KeyboardInterrupt:
    may_end.set()
    sys.exit("interrupted")
"""
FAILED = """
try:
    raise ValueError("in the step")
finally:
    may_end.set()
"""
FORKED = """
if os.fork() == 0:
    try:
        for _ in batches:
            pass
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
    os._exit(0)
os.wait()
may_end.set()
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (INTERRUPTED, "interrupted"),
        (FAILED, "in the step"),
        pytest.param(FORKED, "got a process forked within an epoch", marks=pytest.mark.full),
    ],
)
def test_a_program_ends_while_files_are_read(folder, ending, said):
    program = [sys.executable, "-c", PROGRAM + ending, str(folder)]
    ended = subprocess.run(program, timeout=WAIT, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1 and said in ended.stderr, ended.stderr


@pytest.mark.full
def test_a_forked_process_does_not_read_array_records(folder):
    program = """
import os, sys
from array_record.python.array_record_module import ArrayRecordWriter
import hvdkit as hk

writer = ArrayRecordWriter(path := sys.argv[1] + "/a.array_record", "group_size:1")
for _ in range(8):
    writer.write(b"x")
writer.close()
data = lambda: hk.data.GlobalBatches(hk.data.array_record(path), 2, epochs=1, rank=0, size=1)
assert len([*data()]) == 4
if os.fork() == 0:
    try:
        [*data()]
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
assert len([*data()]) == 4
"""
    ended = subprocess.run([sys.executable, "-c", program, folder], timeout=WAIT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "array_record: got a process forked after it had read, expected" in ended.stdout
