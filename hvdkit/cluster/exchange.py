"""Exchange of Python objects among all ranks: over mpi4py where there is an MPI world, else over Horovod.

One primitive serves: every rank gives bytes, every rank gets all of them in rank order. A message of some bytes
takes tens of microseconds over mpi4py; Horovod takes a cycle (1 ms).

A rank that leaves (its script ended, or raised) can never answer. Under MPI the others would wait for ever, so a
leaving rank sends a word to its peers, and who waits listens for it.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvdkit.cluster.progress import collective
from hvdkit.errors import ClusterError, describe

_LEAVING = 7
_LARGEST = 2**31 - 1
_SPIN_SECONDS = 0.002
_NAP_SECONDS = 0.0005
_GRACE_SECONDS = 0.2


class ObjectExchange:
    """All-to-all exchange of picklable objects, called by every rank in the same order, from one thread.

    Args:
        horovod: the running ``horovod.tensorflow``, or whoever knows rank and size in a world of one.
        communicator: an mpi4py communicator of hvdkit's own, or None to go through Horovod.
    """

    def __init__(self, horovod: Any, communicator: Any = None) -> None:
        self._horovod = horovod
        self._comm = communicator
        self._rank = horovod.rank()
        self._size = horovod.size()

    @property
    def over_mpi(self) -> bool:
        """True where objects travel over mpi4py, which needs no TensorFlow."""
        return self._comm is not None

    def allgather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in rank order. A rank's own is returned as a copy, too.

        Raises:
            ClusterError: a rank left while this one waited for it.
        """
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(part) for part in self.allgather_bytes(data)]

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the ``value`` of rank ``root``; other ranks' values are not sent.

        Raises:
            ClusterError: a rank left while this one waited for it.
        """
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if self._rank == root else b""
        return pickle.loads(self.allgather_bytes(data)[root])

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order."""
        self.check_length(len(data))
        if self._size == 1:
            return [data]
        mine = np.frombuffer(data, np.uint8)
        with collective("an exchange of objects"):
            lengths, gathered = self._over_mpi(mine) if self._comm is not None else self._over_horovod(mine)
        ends = np.cumsum(lengths)
        return [gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]

    def check_length(self, length: int) -> None:
        """Raise ValueError where a rank may not send so many bytes at once."""
        if length > _LARGEST // self._size:
            raise ValueError(
                describe(
                    "object",
                    f"{length} bytes pickled",
                    f"at most {_LARGEST // self._size} bytes from each of {self._size} ranks",
                    "send large arrays with hk.allgather or hk.broadcast",
                )
            )

    def _over_horovod(self, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Lengths ride in front of the bytes, so that one collective serves.
        header = np.array([len(mine)], np.int64).view(np.uint8)
        with _on_host():
            blob = self._horovod.allgather(np.concatenate([header, mine]), name="hvdkit.objects").numpy()
        lengths, parts, start = [], [], 0
        for _ in range(self._size):
            length = int(blob[start : start + 8].view(np.int64)[0])
            lengths.append(length)
            parts.append(blob[start + 8 : start + 8 + length])
            start += 8 + length
        return np.array(lengths), np.concatenate(parts)

    def _over_mpi(self, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.empty(self._size, np.int64)
        self._wait(self._comm.Iallgather(np.array([len(mine)], np.int64), lengths))
        gathered = np.empty(int(lengths.sum()), np.uint8)
        self._wait(self._comm.Iallgatherv(mine, (gathered, lengths)))
        return lengths, gathered

    def _wait(self, request: Any) -> None:
        """Wait for ``request``, giving up the core between looks, unless a peer says that it leaves."""
        started = time.perf_counter()
        while not request.Test():
            if self._comm.Iprobe(tag=_LEAVING):
                # The word may have overtaken the last message of a peer that did answer: look once more.
                time.sleep(_GRACE_SECONDS)
                if request.Test():
                    return
                self._raise_left()
            if time.perf_counter() - started > _SPIN_SECONDS:
                time.sleep(_NAP_SECONDS)

    def _raise_left(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        self._comm.Iprobe(tag=_LEAVING, status=status)
        left = status.Get_source()
        raise ClusterError(
            f"rank {left} left the job while rank {self._rank} waited for it in a collective; its own output says why"
        )

    def close(self) -> None:
        """Tell the peers that this rank leaves. It exchanges nothing any more."""
        if self._comm is not None and self._size > 1:
            word = np.zeros(1, np.uint8)
            for peer in range(self._size):
                if peer != self._rank:
                    self._comm.Isend(word, dest=peer, tag=_LEAVING)


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Exchange now and on the CPU, also where a graph is being traced."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/CPU:0"):
        yield
