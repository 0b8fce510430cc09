"""Exchange of Python objects among all ranks: over mpi4py if MPI is available, otherwise over Horovod.

There is a single primitive, an allgather of bytes in rank order. A message of a few bytes takes tens of microseconds
over mpi4py, and one cycle (1 ms) over Horovod.

A rank that leaves (its script ended, or raised) can no longer answer, and under MPI the others would wait forever. So a
leaving rank sends its peers the number of exchanges that it has completed, and a rank that waits in a later one raises.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdkit.cluster.call_order import CallOrder
from hvdkit.cluster.mesh import Group
from hvdkit.cluster.progress import collective
from hvdkit.errors import ClusterError

_LEAVING = 7
LARGEST = 2**31 - 1  # maximum bytes of one collective: MPI counts them with a C int
# Bytes of each rank's message that are sent along with its length over MPI: minimum, maximum, and total of all ranks.
_FEWEST_FIRST_BYTES, _MOST_FIRST_BYTES, _FIRST_BYTES_OF_ALL = 2**12, 2**15, 2**17
_OBJECTS = "an exchange of objects"
_SPIN_SECONDS = 0.002
_NAP_SECONDS = 0.0005


class ObjectExchange:
    """Exchange of picklable objects among ranks. Every rank must call it in the same order, from one thread.

    Args:
        horovod: the running ``horovod.tensorflow``, or an object with rank and size in a world of one rank.
        communicator: hvdkit's mpi4py communicator of all ranks, or None to use Horovod.
        group: the ranks that take part; None for all. All of them must construct the exchange, in the same order.
            Without ``communicator``, the group must have a process set.
        order: the call order shared by all exchanges of this rank.
    """

    def __init__(
        self, horovod: Any, communicator: Any = None, group: Group | None = None, order: CallOrder | None = None
    ) -> None:
        self._horovod = horovod
        self._world = self._comm = communicator
        self._group = group
        self._rank, self._size = horovod.rank(), horovod.size()
        self._ranks: Sequence[int] = range(self._size)
        if group is not None:
            self._rank, self._size, self._ranks = group.index, group.size, group.ranks
            if communicator is not None and group.size > 1:
                self._comm = communicator.Create_group(communicator.group.Incl(group.ranks))
        self._order = order or CallOrder()
        self._interruption: str | None = None
        self._group_ranks = None if group is None else tuple(group.ranks)
        self._farewells: list[Any] = []  # kept alive: MPI may still be sending them
        self._longest = 0  # bytes of the longest message of the previous exchange, known to all ranks

    @property
    def ranks(self) -> Sequence[int]:
        """The participating ranks, by their numbers in the world, in ascending order."""
        return self._ranks

    @property
    def size(self) -> int:
        """The number of participating ranks."""
        return self._size

    @property
    def over_mpi(self) -> bool:
        """True if objects are sent over mpi4py, which does not need TensorFlow."""
        return self._comm is not None

    def allgather(self, value: Any, name: str = _OBJECTS) -> list[Any]:
        """Return the ``value`` of every rank, in rank order. This rank's value is also returned as a copy.

        Args:
            value: a picklable object.
            name: shown in rank 0's reports of ranks that wait in this exchange.

        Raises:
            ClusterError: a rank left while this one waited for it.
        """
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(part) for part in self.allgather_bytes(data, name)]

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the ``value`` of rank ``root``; other ranks' values are not sent.

        Raises:
            ClusterError: a rank left while this one waited for it.
        """
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if self._rank == root else b""
        return pickle.loads(self.allgather_bytes(data)[root])

    def allgather_bytes(self, data: bytes, name: str = _OBJECTS) -> list[bytes]:
        """Return the bytes of every rank, in rank order.

        The size is not limited: more than the 2^31 - 1 bytes of one collective are sent in several.

        Args:
            data: this rank's bytes.
            name: shown in rank 0's reports of ranks that wait in this exchange.

        Raises:
            ClusterError: a rank left while this one waited for it, or an exception interrupted an earlier exchange.
        """
        if self._size == 1:
            return [data]
        mine = np.frombuffer(data, np.uint8)
        ranks = None if self._group is None else self._ranks
        with self._order.entered(), collective(name, ranks, len(data)), self._whole():
            lengths, parts = self._begin(mine)
            while left := [rank for rank, part in enumerate(parts) if len(part) < lengths[rank]]:
                counts = np.zeros(self._size, np.int64)
                for rank in left:
                    counts[rank] = min(lengths[rank] - len(parts[rank]), LARGEST // len(left))
                start = len(parts[self._rank])
                blob = self._gather(mine[start : start + counts[self._rank]], counts)
                for rank, stop in zip(left, np.cumsum(counts[left]), strict=True):
                    parts[rank] += blob[stop - counts[rank] : stop].data
            self._order.completed[self._group_ranks] += 1
        return [bytes(part) for part in parts]

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Reject all exchanges after one that an exception interrupted: leftover messages would match the next one."""
        if self._interruption is not None:
            raise ClusterError(f"an exchange between ranks was interrupted ({self._interruption}); end this rank")
        try:
            yield
        except BaseException as error:
            self._interruption = f"{type(error).__name__}: {error}"
            raise

    def _gather(self, mine: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the concatenated bytes of all ranks, ``counts[r]`` of rank r; at most :data:`LARGEST` in total."""
        if self._comm is None:
            with _on_host():
                within = {} if self._group is None else {"process_set": self._group.process_set}
                return self._horovod.allgather(mine, name="hvdkit.objects", **within).numpy()
        gathered = np.empty(int(counts.sum()), np.uint8)
        self._wait(self._comm.Iallgatherv(mine, (gathered, counts)))
        return gathered

    def _begin(self, mine: np.ndarray) -> tuple[np.ndarray, list[bytearray]]:
        """Exchange lengths along with the first bytes, so that small messages do not need a second collective.

        MPI must know how much each rank sends before the lengths are known. Every rank sends as many bytes as the
        longest message of the previous exchange, because calls in a loop repeat their sizes.
        """
        header = np.array([len(mine)], np.int64).view(np.uint8)
        most = LARGEST // self._size - len(header)
        if self._comm is None:
            first = max(0, most)
            blob = self._gather(np.concatenate([header, mine[:first]]), np.empty(0))
        else:
            wanted = max(self._longest, _FEWEST_FIRST_BYTES)
            first = max(0, min(wanted, _MOST_FIRST_BYTES, _FIRST_BYTES_OF_ALL // self._size, most))
            padded = np.zeros(len(header) + first, np.uint8)
            padded[: len(header)] = header
            padded[len(header) : len(header) + len(mine[:first])] = mine[:first]
            blob = np.empty(self._size * len(padded), np.uint8)
            self._wait(self._comm.Iallgather(padded, blob))
        lengths, parts, start = np.empty(self._size, np.int64), [], 0
        for rank in range(self._size):
            begin = start + len(header)
            lengths[rank] = blob[start:begin].view(np.int64)[0]
            stop = begin + min(int(lengths[rank]), first)
            parts.append(bytearray(blob[begin:stop].data))
            start = stop if self._comm is None else begin + first
        self._longest = int(lengths.max())
        return lengths, parts

    def _wait(self, request: Any) -> None:
        """Poll ``request`` until it completes, yielding the core in between. Raise if a peer leaves."""
        started = time.perf_counter()
        while not request.Test():
            if (left := self._left()) is not None:
                raise ClusterError(
                    f"rank {left} left the job while rank {self._ranks[self._rank]} waited for it in a collective; its "
                    "own output says why"
                )
            if time.perf_counter() - started > _SPIN_SECONDS:
                time.sleep(_NAP_SECONDS)

    def _left(self) -> int | None:
        """Return a rank that left the job before this exchange, or None.

        A rank that has completed the exchange may leave while others are still in it.
        """
        while self._world.Iprobe(tag=_LEAVING):
            rank, completed = self._world.recv(tag=_LEAVING)
            self._order.left[rank] = completed
        left, here = self._order.left, self._order.completed[self._group_ranks]
        return next((rank for rank in self._ranks if rank in left and left[rank][self._group_ranks] <= here), None)

    def close(self) -> None:
        """Notify the peers that this rank leaves. It must not exchange anything afterwards."""
        if self._comm is not None and self._size > 1:
            word = (self._rank, self._order.completed)
            self._farewells = [
                self._comm.isend(word, dest=peer, tag=_LEAVING) for peer in range(self._size) if peer != self._rank
            ]


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Run eagerly and on the CPU, even while a graph is being traced."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/CPU:0"):
        yield
