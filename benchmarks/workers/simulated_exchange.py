"""The exchange of objects in benchmarks/control_plane.py: rank 0 in a ring whose other ranks are simulated."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from simulated import RANKS_PER_HOST, measured, read, write

from hvdkit.watchdog.channel import Offer


class Ring:
    """The mpi4py interface that ``ObjectExchange`` needs, for rank 0 of a ring; each step passes on one rank's bytes.

    The other end (:func:`exchange_ranks`) simulates the rest of the ring. It repeats rank 0's message for each of the
    other ranks, as real ranks would if they agree.
    """

    def __init__(self, connection: socket.socket, size: int) -> None:
        self.connection, self._pieces, self._size = connection, pieces_over(connection), size
        self.messages = 0

    def Iallgather(self, mine: np.ndarray, every: np.ndarray) -> Ring:
        """Gather the same number of bytes from each rank."""
        self.Iallgatherv(mine, (every, None))
        return self

    def Iallgatherv(self, mine: np.ndarray, every: tuple[np.ndarray, Any]) -> Ring:
        """Gather each rank's bytes."""
        piece = mine.tobytes()
        pieces = [piece]
        for _ in range(self._size - 1):
            self._pieces.send_bytes(piece)
            piece = self._pieces.recv_bytes()
            pieces.append(piece)
            self.messages += 2
        into = every[0].view(np.uint8)
        into[:] = np.frombuffer(b"".join([pieces[0], *reversed(pieces[1:])]), np.uint8)
        return self

    @staticmethod
    def Test() -> bool:
        """Return True: a collective is complete when it returns."""
        return True

    @staticmethod
    def Iprobe(tag: int) -> bool:
        """Return False: no rank leaves the exchange."""
        return False


def horovod(size: int) -> Any:
    """Return the Horovod interface that ``ObjectExchange`` needs."""
    return SimpleNamespace(rank=lambda: 0, size=lambda: size)


def pieces_over(connection: socket.socket) -> Connection:
    """Return an object that sends and receives length-prefixed bytes over a connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(os.dup(connection.fileno()))


@contextlib.contextmanager
def ring(size: int, folder: Path) -> Iterator[Ring]:
    """Act as rank 0 of a ring within the context."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        write(folder, "place.json", server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        yield Ring(connection, size)


def exchange_ranks(size: int, folder: Path, ranks: range, _: str) -> None:
    """Simulate the rest of the ring: return each of rank 0's first messages once for each other rank."""
    with socket.create_connection(("127.0.0.1", read(folder, "place.json"))) as connection:
        pieces = pieces_over(connection)
        with contextlib.suppress(EOFError, OSError):
            while True:
                piece = pieces.recv_bytes()
                for step in range(size - 1):
                    pieces.send_bytes(piece)
                    if step < size - 2:
                        pieces.recv_bytes()
    write(folder, f"ranks-{ranks.start}.json", {})


def exchange_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Agree on the world, like ``hk.init()``, and on the end of a save, like each poll of it."""
    from hvdkit.cluster import rank_facts
    from hvdkit.cluster.agreement import gather
    from hvdkit.cluster.exchange import ObjectExchange

    offer = str(Offer(("127.0.0.1",), 1, "0" * 32))
    with ring(size, folder) as communicator:
        exchange = ObjectExchange(horovod(size), communicator)
        agree = partial(rank_facts.gather_rank_facts, None, exchange, size, offer)
        found = {"agreement": measured(agree, communicator)}
        look = partial(gather, exchange, "the end of a save", lambda: (True, None))
        found["look at a save"] = measured(look, communicator)
    write(folder, "rank0.json", found)


def manifest_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Agree on a checkpoint's manifest (and a state without tensors) with the other ranks: the start of a restore."""
    from hvdkit.checkpoint.folder import latest
    from hvdkit.checkpoint.rank_checks import open_checkpoint
    from hvdkit.cluster import world
    from hvdkit.cluster.exchange import ObjectExchange

    path = latest(folder)
    assert path is not None
    hosts = tuple(f"host-{rank // RANKS_PER_HOST}" for rank in range(size))
    here = world.Cluster(
        rank=0, size=size, local_rank=0, local_size=RANKS_PER_HOST, hosts=hosts, is_chief=True, mesh={"data": size}
    )
    with ring(size, folder) as communicator:
        world._world = world._World(here, horovod(size), ObjectExchange(horovod(size), communicator))
        found = {"manifest exchange": measured(lambda: open_checkpoint(path, {}), communicator)}
    world._world = None
    write(folder, "rank0.json", found)
