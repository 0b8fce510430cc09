"""Kill saves at every system call, and check the files on disk. Run by tests/jobs/test_save_faults.py.

The ranks are forked processes that write through ``hvdkit.checkpoint.writing`` like real ranks, without MPI or
TensorFlow: a save exchanges only files. Prints one JSON line per case.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from hvdkit.checkpoint import tensorfile
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.folder import latest, prune, tidy
from hvdkit.checkpoint.manifest import Manifest, step_of
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.sharding.partition import rows_of

CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")
ROWS = 7
WORKERS = 6


def state_of(value: float, rank: int, size: int) -> State:
    """Return a state with every element set to ``value``: replicated, sharded over the ranks, and one for each rank."""

    def tensor(name: str, kind, array: np.ndarray, shape: tuple[int, ...], index=None) -> StateTensor:
        return StateTensor(name, kind, array.dtype, shape, lambda: array, lambda _: None, index=index, partition="mod")

    rows = rows_of("mod", ROWS, rank, size)
    tensors = [
        tensor("w", "replicated", np.full(5, value), (5,)),
        tensor("table", "sharded", np.full((len(rows), 3), value), (ROWS, 3), (rows, range(3))),
        tensor("seed", "per_rank", np.full(2, value + rank), (2,)),
    ]
    return State(tensors={t.name: t for t in tensors})


def rank_saves(target: Path, value: float, rank: int, size: int) -> None:
    """Save as one rank, keeping only the newest checkpoint."""
    snapshot = Snapshot.of(state_of(value, rank, size), rank)
    save = Save(
        target,
        snapshot,
        step=step_of(target) or 0,
        rank=rank,
        size=size,
        token="t",
        after_commit=lambda: prune(target, 1, None),
    )
    save.start()
    while not save.wait(10):
        pass
    if save.error is not None:
        raise save.error


def job(
    target: Path, value: float, size: int, victim: int | None = None, stage: int = 0, all_die: bool = False
) -> bool:
    """Fork the ranks of one save; return True if the victim was killed at call number ``stage``."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                if rank == victim:
                    die_at(stage)
                rank_saves(target, value, rank, size)
                os._exit(0)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
        pids.append(pid)
    killed = False
    if victim is not None:
        _, status = os.waitpid(pids[victim], 0)
        killed = os.WIFSIGNALED(status)
        if killed and not all_die:
            time.sleep(0.01)  # the other ranks continue until a launcher would notice
        for pid in [p for p in pids if p != pids[victim]] if killed else []:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            continue
        if not killed and status:
            raise SystemExit(f"a rank of an undisturbed save failed: {status}")
    return killed


def die_at(stage: int) -> None:
    """Have this process kill itself with SIGKILL at call number ``stage`` on files, folders and byte ranges."""
    left = [stage]

    def counted(real: Callable) -> Callable:
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    tensorfile._write = counted(tensorfile._write)


def what_is_left(folder: Path) -> tuple[str, float]:
    """Return the newest checkpoint's name and value after reading and verifying all its bytes."""
    path = latest(folder)
    assert path is not None, f"nothing is left: {sorted(p.name for p in folder.iterdir())}"
    manifest = Manifest.load(path)
    with Reader(path, manifest) as reader:
        values = {float(x) for x in reader.whole("w")}
        values |= {float(x) for x in reader.sharded("table", (range(ROWS), range(3))).ravel()}
        for rank in range(manifest.size):
            seeds = reader.per_rank("seed", rank, manifest.size, "keep")
            assert seeds is not None
            values |= {float(x) - rank for x in seeds}
    assert len(values) == 1, values
    return path.name, values.pop()


def kill_at_every_stage(size: int, victim: int, all_die: bool, name: str) -> list[dict[str, object]]:
    """With value 1 saved as step 1, save value 2 as ``name``, killed at call 1, 2, ... until no call is left."""
    stage, killed, cases = 0, True, []
    while killed:
        stage += 1
        folder = Path(tempfile.mkdtemp())
        job(folder / "step-000000001", 1.0, size)
        killed = job(folder / name, 2.0, size, victim, stage, all_die)
        tidy(folder)  # as the next run does when it starts
        found, value = what_is_left(folder)
        left = sorted(p.name for p in folder.iterdir())
        job(folder / "step-000000003", 3.0, size)
        after = what_is_left(folder)
        case = {"size": size, "victim": victim, "all": all_die, "name": name, "stage": stage, "killed": killed}
        cases.append({**case, "found": found, "value": value, "left": left, "after": after})
        shutil.rmtree(folder)
    return cases


def main() -> None:
    """Run all cases, several at a time: they wait mostly for the disk's fsync."""
    with ProcessPoolExecutor(WORKERS) as pool:
        going = [
            pool.submit(kill_at_every_stage, size, victim, all_die, name)
            for size in (3, 1)
            for victim, all_die in sorted({(0, False), (0, True), (size - 1, False)})
            for name in ("step-000000002", "step-000000001")
        ]
        for one in going:
            for case in one.result():
                print(json.dumps(case))


if __name__ == "__main__":
    main()
