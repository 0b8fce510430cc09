"""The cache of built wheels: folder, entry names, and atomic storage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hvdkit.commands.build_horovod.build_progress import BuildProgress
from hvdkit.errors import BuildError, describe
from hvdkit.machine.replacing import replaced


def writable_folder(option: str, chosen: Path) -> Path:
    """Return the absolute path of the folder ``chosen`` by ``option``, creating it if necessary.

    Raises:
        BuildError: the folder cannot be created or written to.
    """
    folder = chosen.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise BuildError(describe(option, str(folder), "a writable folder", f"pass {option} FOLDER"))
    return folder


def entry_name(facts: Mapping[str, str]) -> str:
    """Return the cache entry's name: the facts that matter to users, then a digest of all facts.

    Example:
        >>> facts = {"horovod": "0.28.1", "tensorflow": "2.21.0", "python": "cp311", "mpi": "none"}
        >>> entry_name({**facts, "gpu": "none"})
        'horovod-0.28.1-tf2.21.0-cp311-mpi_none-gpu_none-67cad13346'
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:10]
    shown = "horovod-{horovod}-tf{tensorflow}-{python}-mpi_{mpi}-gpu_{gpu}".format(**facts)
    return f"{shown}-{digest}"


def cached_wheel(entry: Path) -> Path | None:
    """Return the wheel in ``entry``, or None."""
    return next(iter(sorted(entry.glob("*.whl"))), None)


def store(file: Path, folder: Path) -> Path:
    """Copy ``file`` into ``folder`` atomically; return the copy."""
    copy = folder / file.name
    with replaced(copy, folder / f"{file.name}.{os.getpid()}.partial") as partial:
        shutil.copyfile(file, partial)
    return copy


@contextmanager
def locked(entry: Path, progress: BuildProgress) -> Iterator[None]:
    """Lock ``entry``; a concurrent build of the same wheel waits, and then finds the result."""
    entry.mkdir(exist_ok=True)
    lock = FileLock(entry / "lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        progress.step(f"wait for another build of {entry.name}")
        held = lock.acquire()
    with held:
        yield
