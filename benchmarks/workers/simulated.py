"""Code shared by the processes of benchmarks/control_plane.py: files to synchronize with, resource usage, sentinels."""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time
from typing import Any, Protocol

from hvdkit.machine.processes import allow_files
from hvdkit.watchdog.channel import Closed, Offer, connect
from hvdkit.watchdog.events import Joined, Message

RANKS_PER_HOST = 8
WAIT_SECONDS = 300.0  # for another process of a phase


class Counting(Protocol):
    """Something that counts messages on one connection."""

    messages: int
    connection: socket.socket


def peak_mb() -> float:
    """Return the peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(folder: Path, name: str, content: Any) -> None:
    """Write JSON atomically."""
    hidden = folder / f".{name}"
    hidden.write_text(json.dumps(content))
    hidden.rename(folder / name)


def read(folder: Path, name: str) -> Any:
    """Wait for a file of another process and return its content; raise TimeoutError if it does not appear."""
    until = time.monotonic() + WAIT_SECONDS
    while not (folder / name).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{name} was not written within {WAIT_SECONDS:.0f} s")
        time.sleep(0.005)
    return json.loads((folder / name).read_text())


def sent_and_received(connections: list[socket.socket]) -> int:
    """Return the bytes that all connections have carried so far. Source: struct tcp_info of linux/tcp.h."""
    total = 0
    for one in connections:
        with contextlib.suppress(OSError):
            total += sum(struct.unpack_from("QQ", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 120))
    return total


def measured(act: Callable[[], Any], communicator: Counting | None = None) -> dict[str, float]:
    """Return the cost of ``act`` to this process."""
    connections = [] if communicator is None else [communicator.connection]
    messages = 0 if communicator is None else communicator.messages
    carried, memory, before, began = sent_and_received(connections), peak_mb(), process_time(), time.monotonic()
    act()
    found = {
        "seconds": time.monotonic() - began,
        "cpu": process_time() - before,
        "memory": max(0.0, peak_mb() - memory),
    }
    if communicator is not None:
        found |= {"messages": communicator.messages - messages, "bytes": sent_and_received(connections) - carried}
    return found


def joined(rank: int, size: int) -> Joined:
    """Return the Joined message of a simulated rank's sentinel."""
    host = f"host-{rank // RANKS_PER_HOST}"
    return Joined(rank=rank, size=size, host=host, place=host)


class Sentinels:
    """Sentinels of some simulated ranks: hvdkit's own connections and messages, one thread for all of them.

    Attributes:
        links: the open connections by rank.
        welcome: the coordinator's answer to the first.
    """

    def __init__(self, offer: Offer, ranks: range, size: int, *, at_once: int) -> None:
        allow_files(len(ranks))
        self._selector = selectors.DefaultSelector()
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(lambda rank: connect(offer, joined(rank, size), self._selector, rank), ranks))
        self.links = {rank: link for rank, (link, _) in zip(ranks, found, strict=True)}
        self.welcome = found[0][1]

    def serve(self, seconds: float) -> None:
        """Wait for up to ``seconds`` for messages, and handle them."""
        for key, events in self._selector.select(seconds):
            rank, link = key.data, self.links[key.data]
            if events & selectors.EVENT_WRITE:
                link.flush()
            try:
                for order in link.receive():
                    self.obey(rank, order)
            except Closed:
                self.close(rank)

    def obey(self, rank: int, order: Any) -> None:
        """Handle a message to one sentinel."""
        raise NotImplementedError

    def say(self, rank: int, *messages: Message) -> None:
        """Send messages from one sentinel."""
        for message in messages:
            self.links[rank].send(message)

    def close(self, rank: int) -> None:
        """Close one sentinel's connection."""
        if (link := self.links.pop(rank, None)) is not None:
            link.close()
