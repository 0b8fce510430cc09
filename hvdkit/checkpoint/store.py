"""Saving and restoring over all ranks. Every function here is called by every rank, with the same arguments."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.checkpoint.entries import Entry, State
from hvdkit.checkpoint.files import naming_file
from hvdkit.checkpoint.folder import tidy_one
from hvdkit.checkpoint.link import chief_reads, save_through_chief
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.matching import match, without_numbers
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.state import flatten
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.collectives import broadcast, broadcast_variables
from hvdkit.errors import CheckpointError, CollectiveMismatchError, CorruptCheckpointError, describe
from hvdkit.memory import ALIGNMENT
from hvdkit.partition import FLAT

T = TypeVar("T")
_POLL_SECONDS = 0.02


def save(path: str | Path, state: Mapping[str, Any], *, step: int | None = None, gather: bool = False) -> Path:
    """Save ``state`` as the checkpoint ``path``; return when it is whole and on the disk.

    It is written under another name and renamed at the end: ``path`` is there whole, or not at all, whatever happens.
    Replicated tensors are written by the chief, each rank's own by itself, at the same time.

    Args:
        path: the checkpoint's folder, e.g. ``runs/mnist/checkpoints/step-000001200``. One of that name is replaced.
        state: names of models, optimizers, variables, ... ; see :func:`hvdkit.checkpoint.state.flatten`.
        step: steps trained, for the manifest; by default the number at the end of the path's name, or 0.
        gather: True where ranks do not share a file system: the chief writes everything, and gets the others' parts
            over the network in pieces of about 1 MiB.

    Returns:
        ``path``.

    Raises:
        CheckpointError: a rank cannot write its part (it is named), or ranks do not see one file system. What was
            there before is as it was.
        CollectiveMismatchError: ranks have different states; it names rank and tensor.
        TypeError: the state holds something that cannot be saved.

    Example::

        hk.checkpoint.save("ckpt/step-000000100", {"model": model, "optimizer": optimizer, "global_step": 100})
    """
    path, flat = Path(path), agreed_state(state)
    if step is None:
        number = re.search(r"(\d+)$", path.name)
        step = int(number[1]) if number else 0
    if gather:
        save_through_chief(path, Snapshot.of(flat, cluster.rank(), in_place=True), step=step)
        return path
    token = cluster.exchange().broadcast(secrets.token_hex(4), 0)
    together(lambda: tidy_one(path) if cluster.is_chief() else None)
    check_shared(path.parent)
    finish(begin(path, flat, step=step, token=token, in_place=True))
    return path


def begin(
    path: Path,
    state: State,
    *,
    step: int,
    token: str,
    committed: Callable[[], None] = lambda: None,
    in_place: bool = False,
) -> Save:
    """Take a snapshot on this rank and begin to write it, behind the training. Exchanges nothing.

    With ``in_place`` the caller changes nothing until it is written, and less memory is needed.
    """
    rank, size = cluster.rank(), cluster.size()
    snapshot = Snapshot.of(state, rank, in_place=in_place)
    save = Save(path, snapshot, step=step, rank=rank, size=size, token=token, committed=committed, behind=not in_place)
    return save.start()


def finish(save: Save) -> None:
    """Wait until the checkpoint is whole, or has failed on some rank.

    Raises:
        CheckpointError: on every rank, naming the one that failed.
    """
    while not settled(save, cluster.exchange().allgather(progress_of(save))):
        save.wait(_POLL_SECONDS)


def progress_of(save: Save) -> tuple[bool, str | None]:
    """Return this rank's word for :func:`settled`."""
    done = save.done  # read first: a thread that is alive has not failed for good
    return done, None if save.error is None else _words(save.error)


def settled(save: Save, words: list[tuple[bool, str | None]]) -> bool:
    """Return True once every rank is done with ``save``, given every rank's :func:`progress_of`.

    Raises:
        CheckpointError: on every rank once all are done, if one failed; it names the first that did.
    """
    failed = [(rank, error) for rank, (_, error) in enumerate(words) if error is not None]
    if failed:
        save.cancel()
    if not all(done for done, _ in words):
        return False
    if failed:
        save.clean_up()
        # A rank that gave up because of another is not the cause.
        rank, error = next((f for f in failed if "given up" not in f[1]), failed[0])
        raise CheckpointError(
            f"{save.target}: not saved, rank {rank} failed: {error}; what was saved before is as it was"
        )
    return True


def restore(path: str | Path, into: Mapping[str, Any], *, gather: bool = False) -> dict[str, Any]:
    """Restore the checkpoint ``path``, at any number of ranks, and verify every byte that is read.

    Args:
        path: the checkpoint's folder.
        into: what to restore: the state that was saved, or some of its keys. Variables, models, optimizers and
            generators are set in place.
        gather: as for :func:`save`; the chief reads everything.

    Returns:
        ``into`` with arrays and plain values replaced by those that were saved.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model; nothing has been changed then.
        CorruptCheckpointError: bytes are not those that were saved; it names rank, file and rows. Some variables may
            have been set by then.

    Example::

        restored = hk.checkpoint.restore("ckpt/step-000000100", {"model": model, "global_step": 0})
        print(restored["global_step"])
    """
    path, flat = Path(path), agreed_state(into)
    manifest = agreed_manifest(path)
    names = together(lambda: match(manifest, flat, path))
    together(lambda: _restore_values(path, manifest, flat))  # first: they may not fit, and then no tensor has changed
    _restore_tensors(path, manifest, flat, names, gather)
    return {key: _filled(key, item, flat.found) for key, item in into.items()}


def agreed_manifest(path: Path) -> Manifest:
    """Return the manifest that the chief reads. Raises on every rank what is wrong with it, as ``Manifest.load``."""
    found = together(lambda: Manifest.load(path) if cluster.is_chief() else None)
    return cluster.exchange().broadcast(found, 0)


def agreed_state(state: Mapping[str, Any]) -> State:
    """Lay out ``state`` and compare it over ranks; all ranks then call its tensors by the chief's names.

    Keras numbers layers as a process makes them, so that a rank that made one more has other names for the same model.

    Raises:
        TypeError: something in it cannot be saved.
        CollectiveMismatchError: ranks differ; it names rank and tensor.
    """
    flat = together(lambda: flatten(state))
    tensors = [(e.name, e.kind, e.shape, e.dtype.name, e.partition) for e in flat.entries.values()]
    signature = [*tensors, *((name, "value", (), "", None) for name in flat.values)]
    digest = hashlib.sha256(repr(signature).encode()).digest()
    if len(set(cluster.exchange().allgather_bytes(digest))) > 1:
        signatures = cluster.exchange().allgather(signature)
        _compare(signatures)
        for entry, (name, *_) in zip(flat.entries.values(), signatures[0], strict=False):
            entry.name = name
        flat.entries = {entry.name: entry for entry in flat.entries.values()}
    return flat


def _compare(signatures: list[list[tuple[Any, ...]]]) -> None:
    first = signatures[0]
    for rank, other in enumerate(signatures):
        for mine, theirs in zip(first, other, strict=False):
            if (without_numbers(mine[0]), *mine[1:]) != (without_numbers(theirs[0]), *theirs[1:]):
                raise CollectiveMismatchError(
                    f"state: rank {rank} has {_shown(theirs)}, but rank 0 has {_shown(mine)}; build the same model on "
                    "every rank"
                )
        if len(first) != len(other):
            longer, owner = (first, 0) if len(first) > len(other) else (other, rank)
            extra = longer[min(len(first), len(other))]
            raise CollectiveMismatchError(
                f"state: only rank {owner} of ranks 0 and {rank} has {_shown(extra)}; build one model everywhere"
            )


def _shown(signature: tuple[Any, ...]) -> str:
    name, kind, shape, dtype, partition = signature
    return f"{name!r} ({dtype}{list(shape)}, {kind}{' ' + partition if partition else ''})"


def check_shared(folder: Path) -> None:
    """Make ``folder`` and see that every rank finds there what the chief writes.

    Raises:
        CheckpointError: on every rank: the folder cannot be written, or a rank does not see it.
    """
    token = folder / f".shared-{cluster.exchange().broadcast(secrets.token_hex(4), 0)}"

    def leave() -> None:
        with naming_file(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()

    def look() -> None:
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # has a network file system look again
        if not token.exists():
            here = cluster.cluster()
            raise CheckpointError(
                describe(
                    "logdir",
                    f"{folder}, which rank {here.rank} on {here.hosts[here.rank]} does not share with rank 0 on "
                    f"{here.hosts[0]}",
                    "a folder that all ranks see",
                    "give one on a shared file system, or pass gather=True: everything then goes through the chief",
                )
            )

    together(lambda: leave() if cluster.is_chief() else None)
    try:
        together(look)
    finally:
        if cluster.is_chief():
            token.unlink(missing_ok=True)


class _Outcome(NamedTuple):
    """How one rank fared: whether it met damage, and the words of its error, if it had one."""

    corrupt: bool
    words: str | None


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on one, raise on all: elsewhere a CheckpointError that names it."""
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error
    words = None if problem is None else _words(problem)
    outcomes = cluster.exchange().allgather(_Outcome(isinstance(problem, CorruptCheckpointError), words))
    if problem is not None:
        raise problem
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, _Outcome):
            raise CollectiveMismatchError(
                f"rank {rank} exchanges something else ({outcome!r}) while rank {cluster.rank()} saves, restores "
                "or begins a session; make the same calls in the same order on every rank"
            )
        if outcome.words is not None:
            raise (CorruptCheckpointError if outcome.corrupt else CheckpointError)(f"rank {rank}: {outcome.words}")
    return result


def _restore_values(path: Path, manifest: Manifest, flat: State) -> None:
    rank = cluster.rank()
    for name, value in flat.values.items():
        try:
            if not value.per_rank:
                value.assign(manifest.values[name])
            elif rank < manifest.size:
                value.assign(manifest.rank_values[name][rank])
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: {name!r} does not fit this run: {error}") from error


def _restore_tensors(path: Path, manifest: Manifest, flat: State, names: dict[str, str], gather: bool) -> None:
    rank, size = cluster.rank(), cluster.size()
    replicated = [e for e in flat.entries.values() if e.kind == "replicated"]
    own = [e for e in flat.entries.values() if e.kind != "replicated"]

    def read() -> None:
        with Reader(path, manifest) as reader:
            for entry in replicated if rank == 0 else ():
                entry.assign(_taken_over(reader.whole(names[entry.name]), entry))
            for entry in () if gather else own:
                _assign_own(entry, own_part(reader, entry, names[entry.name], rank, size))

    together(read)
    if gather:
        chief_reads(path, manifest, own, names, _assign_own)
    if size > 1:
        broadcast_variables([e.variable for e in replicated if e.variable is not None])
        for entry in replicated:
            if entry.variable is None:
                entry.assign(np.asarray(broadcast(flat.found[entry.name] if rank == 0 else entry.read())))


def own_part(reader: Reader, entry: Entry, name: str, rank: int, size: int) -> np.ndarray | None:
    """Return the part of a sharded or per-rank tensor that ``rank`` of ``size`` takes; None: it keeps what it has."""
    if entry.kind == "per_rank":
        return reader.per_rank(name, rank, size, entry.resize)
    assert entry.index is not None
    return reader.sharded(name, entry.index, flat=entry.partition == FLAT)


def _assign_own(entry: Entry, part: np.ndarray | None) -> None:
    if part is not None:
        entry.assign(_taken_over(part, entry))


def _taken_over(array: np.ndarray, entry: Entry) -> Any:
    """Return ``array`` as a tensor over the same memory where that can be, so that it is not copied once more."""
    on_host = entry.variable is not None and "CPU" in entry.variable.device.upper()
    if not on_host or array.size == 0 or array.ctypes.data % ALIGNMENT:  # TensorFlow's kernels abort on others
        return array
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except (TypeError, ValueError, RuntimeError, BufferError, tf.errors.OpError):
        return array  # a dtype that DLPack does not know


def _filled(name: str, item: Any, found: Mapping[str, Any]) -> Any:
    """Return ``item`` with what a restore found in the places of arrays and values."""
    if isinstance(item, Mapping):
        return {key: _filled(f"{name}/{key}", part, found) for key, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_filled(f"{name}/{number}", part, found) for number, part in enumerate(item))
    return found.get(name, item)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
