"""Checkpoints with other contents and valid checksums, and what reads them must do: right values, or a clear error."""

from __future__ import annotations

import contextlib
import copy
import random
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hvdkit as hk
from helpers.faults import limited
from hvdkit.checkpoint.entries import Allowed, State, StateTensor
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.errors import printable
from hvdkit.sharding.partition import rows_of

MEMORY = 64 * 2**20
"""Bytes that reading a small checkpoint may take: far less than what forged files claim."""

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2)
"""The table that :func:`save_as` writes with 7 rows."""


def array_tensor(name: str, array: np.ndarray, allowed: Allowed = "any") -> StateTensor:
    """Return ``array`` as a replicated tensor."""
    return StateTensor(name, "replicated", array.dtype, array.shape, lambda: array, print, allowed=allowed)


def state_of(rank: int, size: int, rows: int) -> State:
    """Return a weight, a table whose elements encode their position, a mean and a seed."""
    own = rows_of("mod", rows, rank, size)
    table = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)[own.start : own.stop : own.step]
    mean = np.full(3, float(rank), np.float32)
    entries = [
        StateTensor("w", "replicated", np.dtype(np.float32), (5,), lambda: np.ones(5, np.float32), print),
        StateTensor(
            "table", "sharded", table.dtype, (rows, 2), lambda: table, print, index=(own, range(2)), partition="mod"
        ),
        StateTensor("mean", "per_rank", mean.dtype, (3,), lambda: mean, print, resize="mean"),
    ]
    return State({entry.name: entry for entry in entries})


def save_as(target: Path, size: int = 1, rows: int = 4) -> Path:
    """Save as ``size`` ranks one after the other; the chief then finds all reports."""
    for rank in reversed(range(size)):
        snapshot = Snapshot.of(state_of(rank, size, rows), rank)
        snapshot.rank_values = {"random/python": [rank, 5]}
        step = int(target.name.rpartition("-")[2])
        one = Save(target, snapshot, step=step, rank=rank, size=size, token="t").start()
        while not one.wait(1):
            pass
        assert one.error is None, one.error
    return target


def copied(whole: Path, folder: Path) -> Path:
    """Copy a checkpoint into ``folder``."""
    target = folder / whole.name
    target.mkdir(exist_ok=True)
    for file in whole.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def read_everything(path: Path) -> None:
    """Read all tensors and values in every way that a run and the tools do, and compare them with what was saved."""
    manifest = Manifest.load(path)
    with Reader(path, manifest) as reader:
        for name, tensor in manifest.variables.items():
            if tensor.kind == "per_rank":
                arrays = [reader.per_rank(name, rank, manifest.size, "keep") for rank in range(manifest.size)]
                assert [each.shape for each in arrays] == [tensor.shape] * manifest.size
                reader.per_rank(name, 0, manifest.size + 1, "mean")
            else:
                array = reader.whole(name)
                assert (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype)
                if name == "table":
                    np.testing.assert_array_equal(array, TABLE)
                    np.testing.assert_array_equal(reader.sharded(name, (range(1, 7, 3), range(1, 2))), TABLE[1::3, 1:2])
                if name == "w":
                    np.testing.assert_array_equal(array, np.ones(5, np.float32))
        reader.all_rank_values()


def outcomes(path: Path) -> list[str]:
    """Return the errors of all readers; every one must be an HvdkitError that names a file of the checkpoint."""
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    errors = []
    to = path.parent / "exported"
    readers = [read_everything, lambda p: str(hk.checkpoint.inspect(p)), hk.checkpoint.verify, str_of_listing]
    for reader in [*readers, lambda p: hk.checkpoint.export_npy(p, to, overwrite=True)]:
        try:
            reader(path)
        except hk.HvdkitError as error:
            assert path.name in str(error), error
            assert printable(error, keep="\n") == str(error), error
            errors.append(str(error))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    return errors


def str_of_listing(path: Path) -> None:
    text = str(hk.checkpoint.inspect(path.parent))
    assert printable(text, keep="\n") == text


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Measure Python's and NumPy's memory; what exceeds the limit of addresses raises MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    tracemalloc.start()
    try:
        with limited(resource.RLIMIT_AS, used + 16 * MEMORY):
            yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of ``value`` with ``new`` at a path, or without the value there if it is ``...``."""
    value = copy.deepcopy(value)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return value


def mutations(value: Any) -> list[Any]:
    """Return copies of nested JSON with one value replaced by each of a few others."""
    few = random.Random(0).sample([*places(value)], k=min(40, len([*places(value)])))
    return [replaced(value, at, new) for at in few for new in (..., None, -1, 2**63, "x", [], {})]
