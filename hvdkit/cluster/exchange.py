"""Exchange of Python objects among all ranks: over mpi4py if MPI is available, otherwise over Horovod.

There is a single primitive, an allgather of bytes in rank order. A message of a few bytes takes tens of microseconds
over mpi4py, and one cycle (1 ms) over Horovod.

If a rank leaves the job (its script ended, or raised), the others would wait for it forever under MPI. So a rank that
leaves sends the others the number of exchanges that it has completed, and a rank that waits in a later one raises.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from hvdkit.cluster.call_order import CallOrder
from hvdkit.cluster.mesh import Group
from hvdkit.cluster.progress import collective
from hvdkit.errors import ClusterError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
_LEAVE_TAG = 7
MAX_BYTES = 2**31 - 1  # maximum bytes of one collective: MPI counts them with a C int
# Bytes of each rank's message that are sent along with its length over MPI: minimum, maximum, and total of all ranks.
_MIN_FIRST_BYTES = 2**12
_MAX_FIRST_BYTES = 2**15
_MAX_TOTAL_FIRST_BYTES = 2**17
_OBJECTS = "an exchange of objects"
_SPIN_SECONDS = 0.002
_SLEEP_SECONDS = 0.0005


class ObjectExchange:
    """Exchange of picklable objects among ranks. Every rank must call it in the same order, from one thread.

    Args:
        horovod: the running ``horovod.tensorflow``, or an object with rank and size in a world of one rank.
        communicator: hvdkit's mpi4py communicator of all ranks, or None to use Horovod.
        group: the ranks that take part; None for all. All of them must construct the exchange, in the same order.
            Without ``communicator``, the group must have a process set.
        order: the call order shared by all exchanges of this rank.

    Attributes:
        ranks: the participating ranks, by their numbers in the world, in ascending order.
        size: the number of participating ranks.
    """

    def __init__(
        self,
        horovod: ModuleType | SimpleNamespace,
        communicator: MPI.Intracomm | None = None,
        group: Group | None = None,
        order: CallOrder | None = None,
    ) -> None:
        self._horovod = horovod
        self._world = self._comm = communicator
        self._group = group
        self._rank = horovod.rank()
        self.size = horovod.size()
        self.ranks: Sequence[int] = range(self.size)
        if group is not None:
            self._rank = group.index
            self.size = group.size
            self.ranks = group.ranks
            if communicator is not None and group.size > 1:
                self._comm = communicator.Create_group(communicator.group.Incl(group.ranks))
        self._order = order or CallOrder()
        self._interruption: str | None = None
        self._group_ranks = None if group is None else tuple(group.ranks)
        self._leave_requests: list[MPI.Request] = []  # kept alive: MPI may still be sending them
        self._longest = 0  # bytes of the longest message of the previous exchange, known to all ranks

    @property
    def over_mpi(self) -> bool:
        """True if objects are sent over mpi4py, which does not need TensorFlow."""
        return self._comm is not None

    def allgather(self, value: T, name: str = _OBJECTS) -> list[T]:
        """Return the ``value`` of every rank, in rank order. This rank's value is also returned as a copy.

        Args:
            value: a picklable object.
            name: shown in rank 0's reports of ranks that wait in this exchange.

        Raises:
            ClusterError: a rank left while this one waited for it.
        """
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(part) for part in self.allgather_bytes(data, name)]

    def broadcast(self, value: object, root: int) -> Any:
        """Return the ``value`` of rank ``root``; other ranks' values are not sent.

        Raises:
            ClusterError: a rank left while this one waited for it.
        """
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if self._rank == root else b""
        return pickle.loads(self.allgather_bytes(data)[root])

    def allgather_bytes(self, data: bytes, name: str = _OBJECTS) -> list[bytes]:
        """Return the bytes of every rank, in rank order.

        The size is not limited: more than the 2^31 - 1 bytes of one collective are sent in several.

        Raises:
            ClusterError: a rank left while this one waited for it, or an exception interrupted an earlier exchange.
        """
        if self.size == 1:
            return [data]
        local = np.frombuffer(data, np.uint8)
        with self._order.enter(), collective(name, self._group_ranks, len(data)), self._uninterrupted():
            lengths, parts = self._gather_lengths(local)
            while incomplete := [rank for rank, part in enumerate(parts) if len(part) < lengths[rank]]:
                counts = np.zeros(self.size, np.int64)
                for rank in incomplete:
                    counts[rank] = min(lengths[rank] - len(parts[rank]), MAX_BYTES // len(incomplete))
                start = len(parts[self._rank])
                gathered = self._gather(local[start : start + counts[self._rank]], counts)
                for rank, stop in zip(incomplete, np.cumsum(counts[incomplete]), strict=True):
                    parts[rank] += gathered[stop - counts[rank] : stop].data
            self._order.completed[self._group_ranks] += 1
        return [bytes(part) for part in parts]

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Reject all exchanges after one that an exception interrupted: leftover messages would match the next one."""
        if self._interruption is not None:
            raise ClusterError(f"an exchange between ranks was interrupted ({self._interruption}); exit this process")
        try:
            yield
        except BaseException as error:
            self._interruption = f"{type(error).__name__}: {error}"
            raise

    def _gather(self, local: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the concatenated bytes of all ranks, ``counts[r]`` of rank r; at most :data:`MAX_BYTES` in total."""
        if self._comm is None:
            import tensorflow as tf

            with tf.init_scope(), tf.device("/CPU:0"):  # eagerly, even while a graph is being traced
                options = {} if self._group is None else {"process_set": self._group.process_set}
                gathered: np.ndarray = self._horovod.allgather(local, name="hvdkit.objects", **options).numpy()
                return gathered
        gathered = np.empty(int(counts.sum()), np.uint8)
        self._wait(self._comm.Iallgatherv(local, (gathered, counts)))
        return gathered

    def _gather_lengths(self, local: np.ndarray) -> tuple[np.ndarray, list[bytearray]]:
        """Return the length and the first bytes of every rank's message: small messages need no second collective.

        MPI must know how much each rank sends before the lengths are known. Every rank sends as many bytes as the
        longest message of the previous exchange, because calls in a loop repeat their sizes.
        """
        header = np.array([len(local)], np.int64).view(np.uint8)
        limit = MAX_BYTES // self.size - len(header)
        if self._comm is None:
            first = max(0, limit)
            gathered = self._gather(np.concatenate([header, local[:first]]), np.empty(0))
        else:
            expected = max(self._longest, _MIN_FIRST_BYTES)
            first = max(0, min(expected, _MAX_FIRST_BYTES, _MAX_TOTAL_FIRST_BYTES // self.size, limit))
            padded = np.zeros(len(header) + first, np.uint8)
            padded[: len(header)] = header
            padded[len(header) : len(header) + len(local[:first])] = local[:first]
            gathered = np.empty(self.size * len(padded), np.uint8)
            self._wait(self._comm.Iallgather(padded, gathered))
        lengths = np.empty(self.size, np.int64)
        parts = []
        start = 0
        for rank in range(self.size):
            begin = start + len(header)
            lengths[rank] = gathered[start:begin].view(np.int64)[0]
            stop = begin + min(int(lengths[rank]), first)
            parts.append(bytearray(gathered[begin:stop].data))
            start = stop if self._comm is None else begin + first
        self._longest = int(lengths.max())
        return lengths, parts

    def _wait(self, request: MPI.Request) -> None:
        """Poll ``request`` until it completes, yielding the core in between. Raise if a peer leaves."""
        started = time.perf_counter()
        while not request.Test():
            if (rank := self._departed_rank()) is not None:
                raise ClusterError(
                    f"rank {rank} left the job while rank {self.ranks[self._rank]} waited for it in a collective; its "
                    "own output says why"
                )
            if time.perf_counter() - started > _SPIN_SECONDS:
                time.sleep(_SLEEP_SECONDS)

    def _departed_rank(self) -> int | None:
        """Return a rank that left the job before this exchange, or None.

        A rank that has completed the exchange may leave while others are still in it.
        """
        world = cast("MPI.Intracomm", self._world)  # only MPI has messages between two ranks
        while world.Iprobe(tag=_LEAVE_TAG):
            rank, completed = world.recv(tag=_LEAVE_TAG)
            self._order.final_counts[rank] = completed
        group = self._group_ranks
        final_counts = self._order.final_counts
        completed = self._order.completed
        departed = (rank for rank in self.ranks if rank in final_counts)
        return next((rank for rank in departed if final_counts[rank][group] <= completed[group]), None)

    def close(self) -> None:
        """Notify the peers that this rank leaves. It must not exchange anything afterwards."""
        if self._comm is not None and self.size > 1:
            message = (self._rank, self._order.completed)
            self._leave_requests = [
                self._comm.isend(message, dest=peer, tag=_LEAVE_TAG) for peer in range(self.size) if peer != self._rank
            ]
