"""Base class of sentinels: relays messages between rank and coordinator, watches the rank, ends it on request."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from hvdkit.watchdog.channel import NO_ANSWER, Closed, Connection
from hvdkit.watchdog.events import (
    Busy,
    End,
    Flight,
    GiveFlight,
    GiveStacks,
    Leaving,
    Message,
    Release,
    Sampled,
    Signal,
    Stacks,
    Training,
    Unwound,
    Watching,
    Welcome,
)
from hvdkit.watchdog.rank_process import RankProcess

_LOOK_SECONDS = 0.5
_CHECK_SECONDS = 0.05
# Seconds before SIGKILL, which loses the exit code: for a rank to end itself after its deadline, in addition for a rank
# that has left or unwound, and for a program that does not use hvdkit to exit after SIGTERM.
_KILL_SECONDS, _SHUTDOWN_SECONDS, _TERM_SECONDS = 3.0, 8.0, 2.0
_STACKS_SECONDS, _SAMPLE_SECONDS = 2.0, 1.0


class Sentinel(ABC):
    """Watches one rank.

    Args:
        rank: the rank's process.

    Attributes:
        up: connection to the coordinator, or None.
        welcome: the coordinator's answer, or None until it arrives.
        order: order to end the rank because the job has failed or is over, or None.
        released: True once the rank, and with it this process, may exit.
        due: callbacks to run later, with the time of each.
    """

    def __init__(self, rank: RankProcess) -> None:
        self.selector = selectors.DefaultSelector()
        self.rank = rank
        self.up: Connection | None = None
        self.welcome: Welcome | None = None
        self.order: End | None = None
        self.released = False
        self.due: dict[Callable[[], None], float] = {}
        self._reported_at = self._looked_at = 0.0
        self._most = 0
        self._turned = time.monotonic()

    # ---- event loop -------------------------------------------------------------------------------------------

    def turn(self, most: float = 1e9) -> None:
        """Wait for events and handle them."""
        now = time.monotonic()
        for key, events in self.selector.select(max(0.0, min(most, self._pause(now)))):
            self._ready(key, events)
        now = time.monotonic()
        if now - self._turned > 2.0 + max(0.0, self._pause(now)):
            self.rank.went_on(now)
        self._turned = now
        self._tick(now)

    def _pause(self, now: float) -> float:
        pause = _CHECK_SECONDS if self.welcome is not None and self.welcome.check else _LOOK_SECONDS
        return min([pause, *(at - now for at in self.due.values())])

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data == "up":
            closed = self._hear(self.up, events, self.obey)
            if closed is not None:
                self._lose(is_cut_off=closed.errno in NO_ANSWER)
        elif key.data == "rank":
            self.hear_rank(events)
        else:
            key.data(key.fd)

    def _hear(self, connection: Connection | None, events: int, take: Callable[[Message], None]) -> Closed | None:
        """Send and receive without blocking; return why the connection has ended, or None."""
        assert connection is not None
        if events & selectors.EVENT_WRITE:
            connection.flush()
        try:
            for message in connection.receive():
                if isinstance(message, Message):
                    take(message)
        except Closed as closed:
            connection.close()
            return closed
        return None

    def _tick(self, now: float) -> None:
        for act in [act for act, at in self.due.items() if now >= at]:
            del self.due[act]
            act()
        has_changed = False
        if now - self._looked_at >= _LOOK_SECONDS and not self.rank.has_ended:
            self._looked_at = now
            has_changed = self.rank.look(now)
        if self.welcome is None:
            return
        if self.welcome.check and (collectives := self.rank.collectives()) is not None:
            self.report(collectives)
        if not self.rank.has_ended and (has_changed or now - self._reported_at >= self.welcome.interval):
            self._reported_at = now
            self.report(self.rank.status(now))
        if self.up is not None and self.welcome.heartbeat and self.up.is_cut_off(self.welcome.heartbeat):
            self._lose(is_cut_off=True)

    # ---- the rank ---------------------------------------------------------------------------------------------

    def listen_to_rank(self, connected: socket.socket) -> None:
        """Receive messages from the rank's process over ``connected``."""

        def first(_: int) -> None:
            self.selector.unregister(connected)
            try:
                self.rank.take_files(connected)
            except OSError:
                return
            self.rank.connection = Connection(connected, self.selector, "rank")
            self.tell_rank(Watching(pid=os.getpid()))

        self.selector.register(connected, selectors.EVENT_READ, first)

    def hear_rank(self, events: int) -> None:
        """Exchange messages with the rank."""
        if self._hear(self.rank.connection, events, self.take) is not None:
            self.rank.connection = None

    def take(self, message: Message) -> None:
        """Handle a message of the rank, and report it."""
        now = time.monotonic()
        if isinstance(message, Busy):
            self.rank.set_busy(message.reason, now)
            self._reported_at = 0.0
            return
        if isinstance(message, Sampled):
            self.due[self._report_flight] = now
            return
        if isinstance(message, Training):
            self.rank.trains(message, now)
            self.released = False
        elif isinstance(message, Leaving):
            self.rank.leaving = True
        elif isinstance(message, Unwound):
            self.due.pop(self._end_at_deadline, None)
            if self.kill in self.due:
                self.due[self.kill] += _SHUTDOWN_SECONDS
        elif isinstance(message, Stacks):
            self.due.pop(self._report_no_stacks, None)
        if not self.report(message) and isinstance(message, Leaving):
            self.tell_rank(Release(all_leave=True))

    def tell_rank(self, message: Message) -> bool:
        """Send ``message`` to the rank's process; return False if it is not connected."""
        if self.rank.connection is None:
            return False
        self.rank.connection.send(message)
        return True

    # ---- the coordinator --------------------------------------------------------------------------------------

    def report(self, message: Message) -> bool:
        """Send ``message`` to the coordinator; return False if it is not connected."""
        if self.up is None:
            return False
        self.up.send(message)
        return True

    @abstractmethod
    def lost(self, *, is_cut_off: bool) -> None:
        """Handle the loss of the connection to the coordinator.

        Args:
            is_cut_off: the coordinator's host has stopped answering.
        """

    def _lose(self, *, is_cut_off: bool) -> None:
        assert self.up is not None
        self.up.close()
        self.up = None
        self.lost(is_cut_off=is_cut_off)

    def obey(self, order: Message) -> None:
        """Carry out an order of the coordinator."""
        now = time.monotonic()
        if isinstance(order, Signal):
            self.rank.end(order.number)
        elif isinstance(order, GiveStacks):
            self.due[self._report_no_stacks] = now + _STACKS_SECONDS if self.tell_rank(order) else now
        elif isinstance(order, GiveFlight):
            self._most = order.most
            is_asked = self.rank.stopped_at is None and self.tell_rank(order)
            self.due[self._report_flight] = now + _SAMPLE_SECONDS if is_asked else now
        elif isinstance(order, Release):
            self.released = True
            self.tell_rank(order)
        elif isinstance(order, End):
            self.end(order)

    def end(self, order: End) -> None:
        """Ask the rank to end itself; end it if it cannot or misses the deadline."""
        self.order, now = order, time.monotonic()
        if self.rank.stopped_at is not None:
            self.due[self.kill] = now
        elif self.rank.training is not None and self.tell_rank(order):
            self.due[self._end_at_deadline] = now + order.unwind
            self.due[self.kill] = now + order.unwind + _KILL_SECONDS + (_SHUTDOWN_SECONDS if self.rank.leaving else 0.0)
        else:
            self.rank.end(signal.SIGTERM)
            self.due[self.kill] = now + _TERM_SECONDS

    # ---- deferred callbacks -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the rank."""
        self.rank.end(signal.SIGKILL)

    def _end_at_deadline(self) -> None:
        assert self.order is not None
        self.tell_rank(End(code=self.order.code))

    def _report_flight(self) -> None:
        self.report(Flight(records=self.rank.records(self._most)))

    def _report_no_stacks(self) -> None:
        self.report(Stacks(text="it does not answer, so that its stacks are not known"))
