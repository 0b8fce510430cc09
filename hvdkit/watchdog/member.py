"""The coordinator's state for one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.machine import processes
from hvdkit.watchdog.channel import Peer
from hvdkit.watchdog.events import Exited, Flight, Joined, Message, Release, Stacks, Status


@dataclass(eq=False)
class Member:
    """The coordinator's state for one rank."""

    joined: Joined
    send: Callable[[Message], None]
    heard: float
    peer: Peer | None = None  # None: the sentinel in this process
    status: Status = field(default_factory=Status)
    trains: bool = False  # has called hk.init(), and can exit normally
    leaving: float | None = None  # when its script ended
    released: Release | None = None
    exited: Exited | None = None
    lost: float | None = None  # since when its sentinel has been gone, although the rank had not ended
    is_silent: bool = False  # it was given up, since it did not answer
    unwound: bool = False
    stacks: Stacks | None = None
    flight: Flight | None = None
    clock: float = math.inf  # smallest difference seen between the clock here and its host's

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.joined.rank

    @property
    def here(self) -> bool:
        """True while its process runs, as far as is known."""
        return self.exited is None and self.lost is None

    @property
    def is_connected(self) -> bool:
        """True while its sentinel can answer."""
        return self.peer is None or self.peer.connection.is_open

    @property
    def clock_offset(self) -> float:
        """Seconds to add to its host's clock to get this one's, estimated from the message with the least delay."""
        is_here = self.joined.place == processes.place()
        return 0.0 if is_here or math.isinf(self.clock) else self.clock


def order(members: Mapping[int, Member], message: Message) -> None:
    """Send ``message`` to the sentinels of all running ranks."""
    for member in members.values():
        if member.here:
            member.send(message)
