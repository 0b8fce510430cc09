"""Checkpoints in benchmarks/control_plane.py: hvdkit's own save and restore, without TensorFlow, on real files."""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from simulated import measured, read, write

TABLES, REPLICATED, ROWS_PER_RANK = 4, 8, 16
OPEN_FILES = 256  # limit for a restore of all ranks' files, whatever their number
GENERATOR_STATE = 625  # numbers in the state of Python's or NumPy's generator


def state_of(rank: int, size: int) -> Any:
    """Return a rank's state: replicated tensors, sharded tables, a generator's state as tensor and as plain value."""
    from hvdkit.checkpoint.entries import State, StateTensor, Value
    from hvdkit.sharding.partition import rows_of

    def tensor(name: str, kind: Any, array: np.ndarray, shape: tuple[int, ...], index: Any = None) -> StateTensor:
        return StateTensor(name, kind, array.dtype, shape, lambda: array, lambda _: None, index=index, partition="div")

    rows = ROWS_PER_RANK * size
    own = rows_of("div", rows, rank, size)
    values = np.broadcast_to(np.asarray(own, np.float32)[:, None], (len(own), 8)).copy()
    tensors = [
        tensor(f"dense/{i}", "replicated", np.full((64, 64), i, np.float32), (64, 64)) for i in range(REPLICATED)
    ]
    tensors += [tensor(f"table/{i}", "sharded", values + i, (rows, 8), (own, range(8))) for i in range(TABLES)]
    tensors += [tensor("seed", "per_rank", np.full(3, rank, np.int64), (3,))]
    own_values = {"generator": Value(lambda: [rank] * GENERATOR_STATE, lambda _: None, per_rank=True)}
    return State(tensors={t.name: t for t in tensors}, values=own_values)


def save(rank: int, size: int, folder: Path) -> Any:
    """Write a rank's part of a checkpoint, as ``hk.checkpoint.save`` does."""
    from hvdkit.checkpoint.writing import Save, Snapshot

    snapshot = Snapshot.of(state_of(rank, size), rank)
    one = Save(folder / "step-000000010", snapshot, step=10, rank=rank, size=size, token="t").start()
    while not one.wait(10.0):
        pass
    if one.error is not None:
        raise one.error


def checkpoint_ranks(size: int, folder: Path, ranks: range, _: str) -> None:
    """Save as each of ``ranks``."""
    began = time.monotonic()
    for rank in ranks:
        save(rank, size, folder)
    write(folder, f"ranks-{ranks.start}.json", {"seconds": time.monotonic() - began})


def checkpoint_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Complete a save that the other ranks have written; restore it on as many ranks, on half of them, and on one."""
    from hvdkit.checkpoint.folder import latest
    from hvdkit.checkpoint.manifest import NAME, Manifest
    from hvdkit.checkpoint.reading import Reader

    for path in read(folder, "parts.json"):
        read(folder, path)
    found: dict[str, Any] = {"save's reports": measured(lambda: save(0, size, folder))}
    path = latest(folder)
    assert path is not None, "the checkpoint was not committed"
    found["save's reports"] |= {"messages": size - 1, "bytes": (path / NAME).stat().st_size}
    found["manifest"] = measured(lambda: Manifest.load(path))
    manifest = Manifest.load(path)
    found["manifest"] |= {"messages": len(manifest.files), "bytes": (path / NAME).stat().st_size}

    def restore(ranks: int) -> None:
        with Reader(path, manifest) as reader:
            for e in state_of(0, ranks).tensors.values():
                if e.kind == "replicated":
                    assert (reader.whole(e.name) == e.read()).all()
                elif e.kind == "per_rank":
                    reader.per_rank(e.name, 0, ranks, "keep")
                else:  # the rows of the tables of ``size`` ranks
                    rows = range(e.index[0].start * size // ranks, e.index[0].stop * size // ranks)
                    got = reader.sharded(e.name, (rows, e.index[1]))
                    assert len(got) and (got[:, 0] == np.asarray(rows) + int(e.name[6:])).all()
            found["read"] = reader.bytes_read

    for name, ranks in (("restore, same ranks", size), ("restore, half", max(1, size // 2))):
        found[name] = measured(partial(restore, ranks))
        found[name]["bytes"] = found.pop("read")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, before[1]))
    found["restore, one rank"] = measured(partial(restore, 1))
    found["restore, one rank"] |= {"bytes": found.pop("read"), "messages": size}
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    write(folder, "rank0.json", found)
