"""Save and restore through the chief, if ranks do not share a file system.

The chief controls the exchange. It broadcasts the description of the next transfer; then one collective moves about
1 MiB. A rank therefore holds at most its own part plus one such piece. No rank leaves the exchange before the chief
ends it by a message without a transfer: an error of another rank is raised then, and the rows that it cannot read are
transfers of 0 bytes. Ranks then agree on whether an error occurred.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.checkpoint.entries import StateTensor
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES
from hvdkit.checkpoint.writing import CancelledSaveError, Indices, Save, SaveReport, Snapshot
from hvdkit.cluster.agreement import gather
from hvdkit.collectives import tensors
from hvdkit.errors import describe

_NOTHING = np.empty(0, np.uint8)


class _Transfer(NamedTuple):
    """A transfer from rank ``source`` to rank ``target``, as broadcast by the chief.

    It moves rows ``[start, stop)`` of a rank's part of ``name`` to the chief, or bytes ``[start, stop)`` from it.
    """

    name: str
    start: int
    stop: int
    source: int
    target: int


class SaveThroughChief(Save):
    """The chief writes all files, and receives the other ranks' parts."""

    def start(self) -> SaveThroughChief:
        """Write, and return when it is over: collectives must run in the thread that trains."""
        self._thread.run()
        return self

    def _collect(self, snapshot: Snapshot) -> list[SaveReport]:
        """Write all ranks' parts on the chief."""
        by_name = {tensor.name: tensor for tensor in snapshot.tensors}
        descriptions = _describe_parts(snapshot)
        with _leading():
            reports = [self.write_own(snapshot)]
            for rank, (names, metadata, indices) in list(enumerate(descriptions))[1:]:
                parts = [_remote(by_name[name], rank, indices) for name in names]
                reports.append(SaveReport(self.write_shard(parts, metadata, rank), indices))
        return reports

    def _send(self, snapshot: Snapshot) -> None:
        """Send this rank's part to the chief."""
        _describe_parts(snapshot)
        parts = {tensor.name: tensor for tensor in snapshot.shard_tensors()}
        _follow(lambda transfer: parts[transfer.name].block(transfer.start, transfer.stop), lambda *_: None)


def _describe_parts(snapshot: Snapshot) -> list[tuple[list[str], dict[str, str], Indices]]:
    """Return the names of the tensors in every rank's part, its metadata, and its indices."""
    return gather(
        cluster.exchange(),
        "a save through the chief",
        lambda: ([tensor.name for tensor in snapshot.shard_tensors()], snapshot.metadata(), snapshot.indices()),
        error=CancelledSaveError,
    )


def _remote(tensor: StateTensor, rank: int, indices: Indices) -> StateTensor:
    """Return a tensor of the chief with the part of another rank, whose rows are fetched from there."""
    index = None if tensor.index is None else tuple(range(*axis) for axis in indices[tensor.name])

    def rows(start: int, stop: int) -> np.ndarray:
        received = _perform(_Transfer(tensor.name, start, stop, rank, 0), _NOTHING)
        expected = (stop - start) * math.prod(remote.part_shape[1:]) * tensor.dtype.itemsize
        if len(received) != expected:  # that rank has an error, which it raises at the end of the exchange
            got = f"{len(received)} bytes from rank {rank}"
            what = f"rows {start} to {stop} of {tensor.name}"
            raise CancelledSaveError(describe(what, got, f"{expected}", "see the error of that rank"))
        return received.view(tensor.dtype).reshape(stop - start, *remote.part_shape[1:])

    remote = replace(tensor, index=index, rows=rows)
    return remote


def send_parts(parts: Iterable[tuple[int, StateTensor, np.ndarray]]) -> None:
    """On the chief: send each part of a tensor to a rank, while the other ranks are in :func:`receive_parts`."""
    with _leading():
        for rank, tensor, part in parts:
            data = _bytes_of(part)
            for start in range(0, len(data), BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, len(data))
                _perform(_Transfer(tensor.name, start, stop, 0, rank), data[start:stop])


def receive_parts(tensors: Sequence[StateTensor], assign: Callable[[StateTensor, np.ndarray], None]) -> None:
    """On another rank: take part in the transfers of :func:`send_parts`, and assign each part that is complete."""
    by_name = {tensor.name: tensor for tensor in tensors}
    parts: dict[str, np.ndarray] = {}

    def store(transfer: _Transfer, data: np.ndarray) -> None:
        tensor = by_name[transfer.name]
        if transfer.start == 0:
            parts[transfer.name] = np.empty(tensor.part_shape, tensor.dtype)
        flat = parts[transfer.name].reshape(-1).view(np.uint8)
        flat[transfer.start : transfer.stop] = data
        if transfer.stop == len(flat):
            assign(tensor, parts.pop(transfer.name))

    _follow(lambda _: _NOTHING, store)


@contextlib.contextmanager
def _leading() -> Iterator[None]:
    """On the chief: at the end, also after an error, end the loops over :func:`_follow` on the other ranks."""
    try:
        yield
    except Exception:
        cluster.exchange().broadcast(None, 0)
        raise
    cluster.exchange().broadcast(None, 0)


def _follow(read: Callable[[_Transfer], np.ndarray], store: Callable[[_Transfer, np.ndarray], None]) -> None:
    """Take part in the chief's transfers on another rank, until the chief ends the exchange.

    Args:
        read: returns the data of a transfer from this rank.
        store: receives the data of a transfer to this rank.

    Raises:
        Exception: the exception of ``read`` or ``store``, at the end: other ranks wait for this one in every transfer.
    """
    problem: Exception | None = None
    while (transfer := cluster.exchange().broadcast(None, 0)) is not None:
        sent = _NOTHING
        if transfer.source == cluster.rank() and problem is None:
            try:
                sent = _bytes_of(read(transfer))
            except Exception as error:
                problem = error
        received = _exchange(transfer, sent)
        if transfer.target == cluster.rank() and problem is None:
            try:
                store(transfer, received)
            except Exception as error:
                problem = error
    if problem is not None:
        raise problem


def _perform(transfer: _Transfer, sent: np.ndarray) -> np.ndarray:
    """Broadcast a transfer and take part in it, on the chief; return the bytes received."""
    cluster.exchange().broadcast(transfer, 0)
    return _exchange(transfer, sent)


def _exchange(transfer: _Transfer, sent: np.ndarray) -> np.ndarray:
    """Move bytes from one rank to another; a collective over all ranks."""
    splits = np.zeros(cluster.size(), np.int32)
    splits[transfer.target] = len(sent)
    with tf.device("/CPU:0"):
        received, _ = tensors.alltoall(tf.constant(sent), tf.constant(splits), "hvdkit.checkpoint")
    return np.asarray(received)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
