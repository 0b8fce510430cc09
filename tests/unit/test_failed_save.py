"""Saves of ranks in one process: a rank that fails is named, and saves behind the training give way to it."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
from helpers.speed import WAIT

import hvdkit as hk
from hvdkit.checkpoint.entries import StateTensor
from hvdkit.checkpoint.saving import all_ranks_done, progress_of
from hvdkit.checkpoint.writing import Save, Snapshot

SIZE, SLOW, FULL = 3, 1, 2


class Disk(Snapshot):
    """The writes of one rank: on rank 1 until the others know of a failure, and to a full disk on rank 2."""

    rank: int
    failure_is_known = threading.Event()

    def shard_tensors(self) -> list[StateTensor]:
        def rows(start: int, stop: int) -> np.ndarray:
            if self.rank == FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            assert self.rank != SLOW or self.failure_is_known.wait(WAIT)
            return np.ones((stop - start, 2), np.float32)

        return [StateTensor("own", "per_rank", np.dtype(np.float32), (4, 2), print, print, rows=rows)]


def start(target: Path, rank: int) -> Save:
    disk = Disk()
    disk.rank = rank
    return Save(target, disk, step=1, rank=rank, size=SIZE, token="t").start()


def test_a_report_with_wrong_contents_fails_the_save(tmp_path):
    """A rank reports to the chief through a file next to its shard."""
    for number, content in enumerate([b"[", b"{}", b'{"files": {"f": [1]}, "indices": {}}', b"\xff"]):
        target = tmp_path / f"step-{number:09d}"
        folder = tmp_path / f".writing-{target.name}-t"
        folder.mkdir()
        (folder / "rank-00001.json").write_bytes(content)
        one = Save(target, Snapshot(), step=number, rank=0, size=2, token="t").start()
        assert one.wait(WAIT)
        assert isinstance(one.error, hk.CheckpointError) and "rank-00001.json: " in str(one.error), one.error
        assert not target.exists()


def test_the_rank_that_failed_is_named_and_not_one_that_was_still_writing(tmp_path):
    saves = [start(tmp_path / "step-000000001", rank) for rank in range(SIZE)]
    told: list[str] = []
    deadline = time.monotonic() + WAIT
    while len(told) < SIZE and time.monotonic() < deadline:
        reports = [progress_of(save) for save in saves]  # what the ranks exchange
        if reports[FULL].failure is not None:
            assert Disk.failure_is_known.is_set() or not reports[SLOW].done
            Disk.failure_is_known.set()
        for save in saves:
            try:
                assert not all_ranks_done(save, reports)
            except hk.CheckpointError as error:
                told.append(str(error))
        time.sleep(0.01)
    assert len(told) == SIZE
    for text in told:
        assert f"not saved, rank {FULL} failed: " in text and "No space left on device" in text
    assert not [*tmp_path.iterdir()]


def test_the_chief_may_take_the_last_report_at_once(tmp_path, monkeypatch):
    """Once the report exists, the folder may be renamed while the rank that wrote it has not returned yet."""
    replace = Path.replace

    def taken(self, target):
        replace(self, target)
        target.parent.rename(tmp_path / "step-1")

    monkeypatch.setattr(Path, "replace", taken)
    save = Save(tmp_path / "step-1", Snapshot(), step=1, rank=1, size=2, token="token").start()
    assert save.wait(WAIT) and save.error is None
    assert (tmp_path / "step-1" / "rank-00001.json").exists()


def test_a_save_behind_the_training_gives_way_to_it(tmp_path):
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, seen = priority(), []
    for background in (True, False):
        options = {"step": 1, "rank": 0, "size": 1, "token": "token", "background": background}
        save = Save(
            tmp_path / f"step-{int(background)}", Snapshot(), **options, after_commit=lambda: seen.append(priority())
        )
        assert save.start().wait(WAIT)
    assert seen == [min(own + 10, 19), own] and priority() == own
