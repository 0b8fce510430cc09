"""Code shared by the processes of benchmarks/control_plane.py: files for synchronization, and resource usage."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

RANKS_PER_HOST = 8
WAIT_SECONDS = 300.0  # for another process of a phase


class Counting(Protocol):
    """Something that counts messages on one connection."""

    messages: int
    connection: socket.socket


def cpu() -> float:
    """Return the CPU seconds of this process, user plus system."""
    return time.process_time()


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
    carried, memory, before, began = sent_and_received(connections), peak_mb(), cpu(), time.monotonic()
    act()
    found = {"seconds": time.monotonic() - began, "cpu": cpu() - before, "memory": max(0.0, peak_mb() - memory)}
    if communicator is not None:
        found |= {"messages": communicator.messages - messages, "bytes": sent_and_received(connections) - carried}
    return found
