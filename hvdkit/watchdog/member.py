"""The coordinator's state for one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.machine import processes
from hvdkit.watchdog.admission import Peer
from hvdkit.watchdog.events import Exited, Flight, Joined, Leaving, Message, Raised, Release, Saved, Stacks, Status
from hvdkit.watchdog.flight_recorder import CollectiveRecord


@dataclass(eq=False)
class Member:
    """The coordinator's state for one rank."""

    joined: Joined
    send: Callable[[Message], None]
    last_heard: float
    peer: Peer | None = None  # None: the sentinel in this process
    status: Status = field(default_factory=Status)
    status_at: float = -math.inf  # when the status arrived
    is_training: bool = False  # has called hk.init(), and can exit normally
    pid: int | None = None  # of the process that called hk.init(), on its host
    script_ended_at: float | None = None
    # Its message that it leaves but keeps Horovod running. Its script counts as ended once it has been released.
    holding: Leaving | None = None
    held_since: float = -math.inf
    released: Release | None = None
    exited: Exited | None = None
    lost_at: float | None = None  # when its sentinel went away although the rank had not ended
    is_silent: bool = False  # its sentinel was given up because it did not answer
    unwound: bool = False
    raised: Raised | None = None  # its last exception that its program may have caught
    raised_at: float = -math.inf
    saved: Saved | None = None
    stacks: Stacks | None = None
    flight: Flight | None = None
    clock_difference: float = math.inf  # smallest difference seen between this host's clock and the rank's

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.joined.rank

    @property
    def waits(self) -> list[CollectiveRecord]:
        """The collectives in which it has waited for some seconds."""
        return self.status.in_graph if self.status.waits is None else [self.status.waits]

    def idle_since(self, at: float) -> float:
        """Return for how long it has been idle, not counting the time before ``at``."""
        return min(self.status.idle, self.status_at - at)

    def continue_from(self, before: Member) -> None:
        """Take over what is known of the rank from its sentinel before this one."""
        self.is_training = before.is_training
        self.status = before.status
        self.pid = before.pid
        self.saved = before.saved

    def disconnect(self) -> None:
        """Close the connection to the sentinel."""
        if self.peer is not None:
            self.peer.connection.close()

    def begin_training(self, pid: int) -> None:
        """Note that the rank has called ``hk.init()``, maybe again after the end of an earlier world."""
        self.is_training = True
        self.script_ended_at = None
        self.holding = None
        self.pid = pid
        self.released = None
        self.unwound = False

    def keep(self, message: Message, now: float) -> None:
        """Keep the rank's state, an answer, or its report of an exception or a save."""
        if isinstance(message, Status):
            self.status = message
            self.status_at = now
            self.clock_difference = min(self.clock_difference, now - message.now)
            self.raised = self.raised if message.has_raised else None
        elif isinstance(message, Raised):
            self.raised = message
            self.raised_at = now
        elif isinstance(message, Saved):
            self.saved = message
        elif isinstance(message, Stacks):
            self.stacks = message
        elif isinstance(message, Flight):
            self.flight = message

    @property
    def is_running(self) -> bool:
        """True while its process runs, as far as is known."""
        return self.exited is None and self.lost_at is None

    @property
    def is_connected(self) -> bool:
        """True while its sentinel can answer."""
        return self.peer is None or self.peer.connection.is_open

    @property
    def is_here(self) -> bool:
        """True if its process can be seen from this one."""
        return self.joined.place == processes.place()

    @property
    def clock_offset(self) -> float:
        """Seconds to add to its host's clock to get this one's, estimated from the message with the least delay."""
        return 0.0 if self.is_here or math.isinf(self.clock_difference) else self.clock_difference


def broadcast(members: Mapping[int, Member], message: Message) -> None:
    """Send ``message`` to the sentinels of all running ranks."""
    for member in members.values():
        if member.is_running:
            member.send(message)
