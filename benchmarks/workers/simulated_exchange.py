"""The exchange of objects in benchmarks/control_plane.py: rank 0 in a ring whose other ranks are simulated."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
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
        self.connection, self._size = connection, size
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
            send_piece(self.connection, piece)
            piece = receive_piece(self.connection)
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
        """Return False: no rank leaves."""
        return False


class Sizes:
    """The Horovod interface that ``ObjectExchange`` needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    @staticmethod
    def rank() -> int:
        """Return 0."""
        return 0

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size


def send_piece(connection: socket.socket, data: bytes) -> None:
    """Send bytes after their length."""
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive_piece(connection: socket.socket) -> bytes:
    """Return the bytes sent by :func:`send_piece`; raise EOFError at the end."""
    (length,) = struct.unpack("!I", receive_exactly(connection, 4))
    return receive_exactly(connection, length)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return exactly ``count`` bytes."""
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    if len(data) < count:
        raise EOFError
    return data


@contextlib.contextmanager
def ring(size: int, folder: Path) -> Iterator[Ring]:
    """Act as rank 0 of a ring while the context lasts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        write(folder, "place.json", server.getsockname()[1])
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        made = Ring(connection, size)
        yield made


def exchange_ranks(size: int, folder: Path, ranks: range) -> None:
    """Simulate the rest of the ring: return each of rank 0's first messages once for each other rank."""
    with socket.create_connection(("127.0.0.1", read(folder, "place.json"))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(EOFError, OSError):
            while True:
                piece = receive_piece(connection)
                for step in range(size - 1):
                    send_piece(connection, piece)
                    if step < size - 2:
                        receive_piece(connection)
    write(folder, f"ranks-{ranks.start}.json", {})


def exchange_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Agree on the world, like ``hk.init()``, and on the end of a save, like each poll of it."""
    from hvdkit.cluster import rank_facts
    from hvdkit.cluster.agreement import gather
    from hvdkit.cluster.exchange import ObjectExchange

    offer = str(Offer(("127.0.0.1",), 1, "0" * 32))
    with ring(size, folder) as communicator:
        exchange = ObjectExchange(Sizes(size), communicator)
        found = {}
        for name, act in (
            ("agreement", lambda: rank_facts.gather_rank_facts(None, exchange, size, offer)),
            ("look at a save", lambda: gather(exchange, "the end of a save", lambda: (True, None))),
        ):
            found[name] = measured(act, communicator)
    write(folder, "rank0.json", found)


def manifest_rank0(size: int, folder: Path, seconds: float, fault: str) -> None:
    """Agree on a checkpoint's manifest with the other ranks, like the start of a restore."""
    from hvdkit.checkpoint.folder import latest
    from hvdkit.checkpoint.rank_checks import agreed_manifest
    from hvdkit.cluster import world
    from hvdkit.cluster.exchange import ObjectExchange

    path = latest(folder)
    assert path is not None
    hosts = tuple(f"host-{rank // RANKS_PER_HOST}" for rank in range(size))
    here = world.Cluster(
        rank=0, size=size, local_rank=0, local_size=RANKS_PER_HOST, hosts=hosts, is_chief=True, mesh={"data": size}
    )
    with ring(size, folder) as communicator:
        world._world = world._World(here, Sizes(size), ObjectExchange(Sizes(size), communicator))
        found = {"manifest exchange": measured(lambda: agreed_manifest(path), communicator)}
    world._world = None
    write(folder, "rank0.json", found)
