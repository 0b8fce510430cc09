"""What the coordinator knows of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.machine import processes
from hvdkit.watchdog.channel import Peer
from hvdkit.watchdog.events import Exited, Flight, Joined, Message, Release, Stacks, Status


@dataclass(eq=False)
class Member:
    """What the coordinator knows of a rank."""

    joined: Joined
    send: Callable[[Message], None]
    heard: float
    peer: Peer | None = None  # None: the sentinel in this process
    status: Status = field(default_factory=Status)
    trains: bool = False  # it has called hk.init(), and can exit normally
    leaving: float | None = None  # since when
    released: Release | None = None
    exited: Exited | None = None
    lost: float | None = None  # since when its sentinel has been gone
    is_silent: bool = False  # it was given up, since it did not answer
    unwound: bool = False
    stacks: Stacks | None = None
    flight: Flight | None = None
    clock: float = math.inf  # the least difference seen between the clock here and the one of its host

    @property
    def rank(self) -> int:
        """Its number."""
        return self.joined.rank

    @property
    def here(self) -> bool:
        """True as long as its process runs, as far as is known."""
        return self.exited is None and self.lost is None

    @property
    def clock_offset(self) -> float:
        """What to add to the clock of its host to get this one's: the least delay of a message comes closest."""
        is_here = self.joined.place == processes.place()
        return 0.0 if is_here or math.isinf(self.clock) else self.clock


def order(members: Mapping[int, Member], message: Message) -> None:
    """Send ``message`` to the sentinels of all ranks that run."""
    for member in members.values():
        if member.here:
            member.send(message)
