"""A coordinator that listens in a thread of the test."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

from helpers.speed import WAIT, wait_until
from hvdkit.watchdog import channel
from hvdkit.watchdog.admission import listen
from hvdkit.watchdog.channel import Connection, Offer, connect
from hvdkit.watchdog.coordinator import Coordinator
from hvdkit.watchdog.events import Joined
from hvdkit.watchdog.settings import WatchdogSettings

LOCAL = "127.0.0.1"
HEADER = channel._HEADER


def joined(rank: int, size: int) -> Joined:
    return Joined(rank=rank, size=size, host=f"host-{rank // 8}", place=f"place-{rank // 8}")


class Job:
    """A coordinator that listens in a separate thread while the context lasts."""

    def __init__(self, size: int, addresses: tuple[str, ...] = (LOCAL,), program: str = "", **limits: float) -> None:
        settings = WatchdogSettings(**limits)
        command = {"command": ["sh", "-c", program], "environment": {}, "terminal": None}
        self.selector = selectors.DefaultSelector()
        self.listeners = listen(addresses)
        self.port = self.listeners[0].getsockname()[1]
        self.offer = Offer(addresses, self.port, "the-token")
        self.lines: list[str] = []
        self.output: Counter[tuple[int, bytes]] = Counter()
        self.coordinator = Coordinator(
            size,
            settings,
            self.selector,
            self.listeners,
            self.offer.token,
            welcome=lambda joined: replace(settings.welcome(size), program=command if program else None),
            lines=SimpleNamespace(line=self.lines.append, finish=lambda seconds: True),
            output=lambda rank, output: self.output.update([(rank, output.data)]),
        )
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the thread: a coordinator is not thread-safe
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Job:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        self._thread.join()
        self.coordinator.close()
        self.selector.close()

    def _run(self) -> None:
        while not self._over.is_set():
            self.turn(0.02)

    def turn(self, seconds: float) -> None:
        while not self.calls.empty():
            self.calls.get()()
        for key, events in self.selector.select(seconds):
            self.coordinator.ready(key, events)
        self.coordinator.tick(time.monotonic())

    def sentinel(self, rank: int = 0, size: int = 1) -> Connection:
        """Return the other end of the connection of a sentinel that has joined."""
        selector = selectors.DefaultSelector()
        made = connect(self.offer, joined(rank, size), selector, selector)[0]
        wait_until(lambda: rank in self.coordinator.members and self.coordinator.members[rank].is_running)
        return made

    def stranger(self) -> socket.socket:
        made = socket.create_connection((LOCAL, self.port))
        made.settimeout(WAIT)
        return made
