"""Save and restore through the chief, if ranks do not share a file system.

The chief drives the transfer. It broadcasts a small object that describes the next move; then one collective moves
about 1 MiB of rows. A rank therefore holds at most its own part plus one such piece.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.checkpoint.entries import Entry
from hvdkit.checkpoint.files import naming_file, remove_folder
from hvdkit.checkpoint.folder import commit, latest, tidy_one, writing_name
from hvdkit.checkpoint.manifest import REPLICATED, Manifest, shard_name
from hvdkit.checkpoint.reading import Reader
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES, Allowed, FileRecord, NonFiniteTensor, OutgoingTensor, write_file
from hvdkit.checkpoint.writing import Snapshot, assemble, non_finite
from hvdkit.cluster.agreement import gather
from hvdkit.collectives import tensors
from hvdkit.errors import CheckpointError, CorruptCheckpointError, NonFiniteError
from hvdkit.sharding.partition import FLAT


class _Order(NamedTuple):
    """A move requested by the chief: rows ``[start, stop)`` of ``name``, from rank ``source`` to rank ``target``."""

    name: str
    start: int
    stop: int
    source: int
    target: int


class _End(NamedTuple):
    """The chief's final message: success, or the error."""

    error: Exception | None


def save_through_chief(
    path: Path,
    snapshot: Snapshot,
    *,
    step: int,
    permitted: Callable[[], None] = lambda: None,
    committed: Callable[[], None] = lambda: None,
) -> None:
    """Write all ranks' parts on the chief. Every rank calls it. For ``permitted`` and ``committed`` see ``Save``.

    Raises:
        CheckpointError: on every rank: the chief cannot write.
        NonFiniteError: on every rank: a tensor contains NaN or an infinity; the message names the rank.
    """
    own = {tensor.name: tensor for tensor in snapshot.own()}
    described = {name: (t.dtype, t.shape, t.allowed) for name, t in own.items()}
    parts = described, snapshot.indices(), snapshot.metadata()
    words = gather(cluster.exchange(), "a save through the chief", lambda: parts)

    def write() -> None:
        tidy_one(path)
        folder = writing_name(path, secrets.token_hex(4))
        try:
            _write_all(folder, snapshot, own, words, step)
            permitted()
            commit(folder, path)
        except BaseException:
            remove_folder(folder)
            raise
        committed()

    _lead(write, lambda order: own[order.name].rows(order.start, order.stop), _refuse)


def _write_all(folder: Path, snapshot: Snapshot, own: dict[str, OutgoingTensor], words: list[Any], step: int) -> None:
    size = cluster.size()
    with naming_file(folder, "written"):
        folder.mkdir(parents=True)
    replicated = snapshot.replicated()
    files = {REPLICATED: _write(folder / REPLICATED, replicated, 0, step)} if replicated else {}
    reports = []
    for rank, (described, indices, metadata) in enumerate(words):
        sent = list(own.values()) if rank == 0 else [_remote(rank, name, *d) for name, d in described.items()]
        records: dict[str, FileRecord] = {}
        if sent or metadata:
            name = shard_name(rank, size)
            records[name] = _write(folder / name, sent, rank, step, metadata)
        reports.append({"files": records, "indices": indices})
    assemble(snapshot, reports, files, step=step).write(folder)


def _write(
    file: Path, tensors: list[OutgoingTensor], rank: int, step: int, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a file of ``rank``'s tensors; an error about non-finite values names the rank."""
    try:
        return write_file(file, tensors, metadata=metadata)
    except NonFiniteTensor as error:
        newest = latest(file.parent.parent)
        raise non_finite(str(error), rank, step, newest.name if newest else None) from None


def _remote(rank: int, name: str, dtype: np.dtype, shape: tuple[int, ...], allowed: Allowed) -> OutgoingTensor:
    """Return a tensor whose rows are fetched from another rank."""

    def rows(start: int, stop: int) -> np.ndarray:
        received = _move(_Order(name, start, stop, rank, 0), None)
        return received.view(dtype).reshape(stop - start, *shape[1:])

    return OutgoingTensor(name, dtype, shape, rows, allowed)


def chief_reads(
    path: Path,
    manifest: Manifest,
    entries: Sequence[Entry],
    names: dict[str, str],
    assign: Callable[[Entry, np.ndarray | None], None],
) -> None:
    """Read ``entries`` on the chief and send every rank its part. Every rank calls it.

    Raises:
        CorruptCheckpointError, CheckpointError: on every rank: the chief cannot read.
    """
    mine = {e.name: (e.kind, e.index, e.partition == FLAT, e.resize) for e in entries}
    wanted = gather(cluster.exchange(), "a restore through the chief", lambda: mine)
    by_name = {entry.name: entry for entry in entries}
    parts: dict[str, np.ndarray] = {}

    def take(order: _Order, data: np.ndarray) -> None:
        entry = by_name[order.name]
        shape = entry.shape if entry.index is None else tuple(len(axis) for axis in entry.index)
        part = parts.setdefault(order.name, np.empty(shape, entry.dtype))
        part.reshape(-1).view(np.uint8)[order.start : order.stop] = data
        if order.stop == part.nbytes:
            assign(entry, parts.pop(order.name))

    def read() -> None:
        with Reader(path, manifest) as reader:
            for rank, theirs in enumerate(wanted):
                for name, (kind, index, flat, resize) in theirs.items():
                    saved = names[name]
                    if kind == "per_rank":
                        part = reader.per_rank(saved, rank, cluster.size(), resize)
                    else:
                        assert index is not None
                        part = reader.sharded(saved, index, flat=flat)
                    if rank == 0:
                        assign(by_name[name], part)
                    elif part is not None:
                        _hand_out(rank, name, part)

    _lead(read, _refuse, take)


def _hand_out(rank: int, name: str, part: np.ndarray) -> None:
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    for start in range(0, len(data), BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, len(data))
        _move(_Order(name, start, stop, 0, rank), data[start:stop])


def _lead(work: Callable[[], None], give: Callable[[_Order], np.ndarray], take: Callable[[_Order, Any], None]) -> None:
    """Run ``work`` on the chief while other ranks execute its orders; all ranks raise an error of the chief."""
    if cluster.is_chief():
        error: Exception | None = None
        try:
            work()
        except Exception as problem:
            error = problem
        plain = isinstance(error, CheckpointError | NonFiniteError) or error is None
        cluster.exchange().broadcast(_End(error if plain else CheckpointError(f"rank 0: {error}")), 0)
        if error is not None:
            raise error
        return
    while not isinstance(order := cluster.exchange().broadcast(None, 0), _End):
        data = give(order) if order.source == cluster.rank() else None
        received = _exchange(order, data)
        if order.target == cluster.rank():
            take(order, received)
    if order.error is not None:
        raise type(order.error)(f"rank 0: {order.error}")


def _refuse(*order: Any) -> Any:
    raise CorruptCheckpointError(f"rank {cluster.rank()} was asked for rows that it does not have: {order}")


def _move(order: _Order, data: np.ndarray | None) -> np.ndarray:
    """Broadcast an order and execute it, on the chief; return the bytes received."""
    cluster.exchange().broadcast(order, 0)
    return _exchange(order, data)


def _exchange(order: _Order, data: np.ndarray | None) -> np.ndarray:
    """Move bytes from one rank to another; a collective over all ranks."""
    flat = np.empty(0, np.uint8) if data is None else np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    splits = np.zeros(cluster.size(), np.int32)
    splits[order.target] = len(flat)
    with tf.device("/CPU:0"):
        received, _ = tensors.alltoall(tf.constant(flat), tf.constant(splits), "hvdkit.checkpoint")
    return np.asarray(received)
