"""One rank of benchmarks/checkpoint.py: save and restore its shard of the state, and plain files of the same bytes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import threading
import time
import timeit
from pathlib import Path

import hvdkit as hk

# isort: split
import numpy as np
import psutil
import tensorflow as tf

from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.rank_checks import agreed_state
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.saving import finish
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.sharding.partition import rows_of

COLUMNS = 256
CHUNK = 2**20


class Table:
    """A table sharded over the ranks in contiguous ranges."""

    dtype, partition = "float32", "div"

    def __init__(self, rows: int):
        self.shape = (rows, COLUMNS)
        self.mine = rows_of("div", rows, hk.rank(), hk.size())
        self.local = tf.Variable(tf.random.stateless_normal([len(self.mine), COLUMNS], [hk.rank(), 0]))

    @property
    def local_index(self) -> tuple[range, ...]:
        return self.mine, range(COLUMNS)

    def assign_local(self, values) -> None:
        self.local.assign(values)


def main() -> None:
    """Measure, and write the chief's results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of state, over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    hk.init()
    table = Table(int(args.gigabytes * 1e9) // (4 * COLUMNS))
    results = [one_round(args.folder, table, number) for number in range(args.rounds + 1)][1:]  # without the warm-up
    if hk.is_chief():
        (args.folder / "results.json").write_text(json.dumps(results))


def one_round(folder: Path, table: Table, number: int) -> dict[str, dict[str, float]]:
    """Measure each variant once. Seconds are the slowest rank's; bytes and MB are the maximum over ranks."""
    state, path, mine = {"table": table}, folder / f"step-{number:09d}", folder / f"plain-{hk.rank()}"
    plain: dict[str, float] = {}
    ours: dict[str, float] = {}

    def write_plain() -> None:
        plain["write"] = slowest(lambda: plain_write(mine, table))

    def save() -> None:
        ours["write"], ours["save_mb"] = with_memory(lambda: hk.checkpoint.save(path, state))

    # Alternate the order: right after writing 2 GB a disk is slower.
    for write in (write_plain, save) if number % 2 else (save, write_plain):
        write()
    ours |= asynchronous(folder, state, table)
    forget(folder)
    plain["read"] = slowest(lambda: plain_read(mine))
    forget(folder)
    ours["read"] = slowest(lambda: hk.checkpoint.restore(path, state))
    ours["read_share"] = read_ratio(path, table)
    hk.barrier()
    if hk.is_chief():
        shutil.rmtree(path)
        for file in folder.glob("plain-*"):
            file.unlink()
    hk.barrier()
    return {"plain": plain, "hvdkit": ours}


def asynchronous(folder: Path, state, table: Table) -> dict[str, float]:
    """Train during a save; return the delay of training and the additional memory."""
    train = tf.function(lambda: table.local.assign_add(tf.ones_like(table.local)))
    step = statistics.median(timeit.repeat(train, number=1, repeat=6))
    stalls = {}

    def save_behind() -> None:
        started = time.perf_counter()
        snapshot = Snapshot.of(agreed_state(state), hk.rank())
        options = {"rank": hk.rank(), "size": hk.size(), "token": "async", "background": True}
        save = Save(folder / "step-900000000", snapshot, step=0, **options).start()
        stalls["call"] = time.perf_counter() - started
        train()  # the first update after the snapshot allocates memory
        stalls["next"] = time.perf_counter() - started - stalls["call"] - step
        while not save.done:
            train()
        finish(save)

    _, megabytes = with_memory(save_behind)
    hk.barrier()
    if hk.is_chief():
        shutil.rmtree(folder / "step-900000000")
    everywhere = hk.allgather_object(stalls)
    call, following = (max(stall[name] for stall in everywhere) for name in ("call", "next"))
    shard = max(hk.allgather_object(len(table.mine) * COLUMNS * 4 / 2**20))
    return {"call": call, "next": following, "stall": call + max(0.0, following), "async_share": megabytes / shard}


def plain_write(path: Path, table: Table) -> None:
    """Write this rank's bytes to a plain file, the fastest way on a file system."""
    data = memoryview(np.asarray(table.local.read_value())).cast("B")
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), CHUNK):
            file.write(data[start : start + CHUNK])
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    """Read a plain file back into memory."""
    data = np.empty(path.stat().st_size, np.uint8)
    view = memoryview(data)
    with path.open("rb", buffering=0) as file:
        while view:
            view = view[file.readinto(view[:CHUNK]) :]


def read_ratio(path: Path, table: Table) -> float:
    """Return the bytes read for this rank's shard, divided by the shard's own bytes."""
    with Reader(path, Manifest.load(path)) as reader:
        reader.sharded("table", table.local_index)
        return max(hk.allgather_object(reader.bytes_read / (len(table.mine) * COLUMNS * 4)))


def forget(folder: Path) -> None:
    """Drop the files from the kernel's page cache, so that reads reach the disk."""
    hk.barrier()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    hk.barrier()


def slowest(action) -> float:
    """Run on all ranks at once; return the slowest rank's seconds."""
    hk.barrier()
    started = time.perf_counter()
    action()
    return max(hk.allgather_object(time.perf_counter() - started))


def with_memory(action) -> tuple[float, float]:
    """Return seconds as :func:`slowest`, and the maximum growth of any rank's memory in MB meanwhile."""
    over, before, found = threading.Event(), resident(), [0]

    def watch() -> None:
        while not over.wait(0.005):
            found.append(resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = slowest(action)
    over.set()
    watcher.join()
    return seconds, max(hk.allgather_object(max(found) / 2**20))


def resident() -> int:
    """Return this process's memory in bytes, without shared file pages."""
    found = psutil.Process().memory_info()
    return found.rss - found.shared


if __name__ == "__main__":
    main()
