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
    Exiting,
    Failed,
    Flight,
    GiveFlight,
    GiveStacks,
    Leaving,
    Message,
    Raised,
    Release,
    Sampled,
    Saved,
    Signal,
    Stacks,
    Training,
    Unwound,
    Watching,
    Welcome,
    WriteLine,
)
from hvdkit.watchdog.lines import write_line
from hvdkit.watchdog.rank_process import RankProcess
from hvdkit.watchdog.rank_texts import tagged

# Seconds between looks at the rank's process.
_POLL_SECONDS = 0.5
# Seconds before SIGKILL, which loses the exit code: for a rank to end itself after its deadline, in addition for a rank
# that has left or unwound, and for a program that does not use hvdkit to exit after SIGTERM.
_KILL_SECONDS = 3.0
_SHUTDOWN_SECONDS = 8.0
_TERM_SECONDS = 2.0
_STACKS_SECONDS = 2.0
_SAMPLE_SECONDS = 1.0


class Sentinel(ABC):
    """Watches one rank.

    Attributes:
        uplink: connection to the coordinator, or None.
        welcome: the coordinator's answer, or None until it arrives.
        order: order to end the rank because the job has failed or is over, or None.
        released: True once the rank, and with it this process, may exit.
        timers: callbacks to run later, with the time of each.
    """

    def __init__(self, rank: RankProcess) -> None:
        self.selector = selectors.DefaultSelector()
        self.rank = rank
        self.uplink: Connection | None = None
        self.welcome: Welcome | None = None
        self.order: End | None = None
        self.released = False
        self.timers: dict[Callable[[], None], float] = {}
        self._reported_at = self._checked_at = 0.0
        self._max_records = 0
        self._late: Exiting | None = None  # a late exit whose stacks have been requested
        self._last_late: Exiting | None = None  # the last one that was reported
        self._late_stacks = "its stacks are unknown: it no longer runs Python; MPI may be waiting for another rank"
        self._turned_at = time.monotonic()

    # ---- event loop -------------------------------------------------------------------------------------------

    def turn(self, timeout: float = 1e9) -> None:
        """Wait for events, at most ``timeout`` seconds, and handle them."""
        now = time.monotonic()
        for key, events in self.selector.select(max(0.0, min(timeout, self._pause(now)))):
            self._ready(key, events)
        now = time.monotonic()
        if now - self._turned_at > 2.0 + max(0.0, self._pause(now)):
            self.rank.skip_pause(now)
        self._turned_at = now
        self._tick(now)

    def _pause(self, now: float) -> float:
        return min([_POLL_SECONDS, *(at - now for at in self.timers.values())])

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data == "uplink":
            closed = self._exchange(self.uplink, events, self.obey)
            if closed is not None:
                self._disconnect(is_cut_off=closed.errno in NO_ANSWER)
        elif key.data == "rank":
            self.exchange_with_rank(events)
        else:
            key.data(key.fd)

    def _exchange(self, connection: Connection | None, events: int, handle: Callable[[Message], None]) -> Closed | None:
        """Send and receive without blocking; return why the connection has ended, or None."""
        assert connection is not None
        if events & selectors.EVENT_WRITE:
            connection.flush()
        try:
            for message in connection.receive():
                if isinstance(message, Message):
                    handle(message)
        except Closed as closed:
            connection.close()
            return closed
        return None

    def _tick(self, now: float) -> None:
        for callback in [callback for callback, at in self.timers.items() if now >= at]:
            del self.timers[callback]
            callback()
        has_changed = False  # whether the rank was stopped or resumed
        if now - self._checked_at >= _POLL_SECONDS and not self.rank.has_ended:
            self._checked_at = now
            has_changed = self.rank.check_stopped(now)
        if self.rank.exits_late(now) and self.rank.exiting is not self._last_late:
            self._late = self._last_late = self.rank.exiting
            self.timers[self._report_late_exit] = now + _STACKS_SECONDS if self.send_to_rank(GiveStacks()) else now
        if self.welcome is None:
            return
        if not self.rank.has_ended and (has_changed or now - self._reported_at >= self.welcome.interval):
            self._reported_at = now
            self.report(self.rank.status(now))
            if self.welcome.measures:
                self.report(self.rank.measured())
        if self.uplink is not None and self.welcome.heartbeat and self.uplink.is_cut_off(self.welcome.heartbeat):
            self._disconnect(is_cut_off=True)

    # ---- the rank ---------------------------------------------------------------------------------------------

    def attach_rank(self, connected: socket.socket) -> None:
        """Receive messages from the rank's process over ``connected``."""

        def receive_files(_: int) -> None:
            self.selector.unregister(connected)
            try:
                self.rank.receive_files(connected)
            except OSError:
                return
            self.rank.connection = Connection(connected, self.selector, "rank")
            self.send_to_rank(Watching(pid=os.getpid()))

        self.selector.register(connected, selectors.EVENT_READ, receive_files)

    def exchange_with_rank(self, events: int) -> None:
        """Exchange messages with the rank."""
        if self._exchange(self.rank.connection, events, self.handle) is not None:
            self.rank.connection = None

    def handle(self, message: Message) -> None:
        """Handle a message of the rank, and report it."""
        now = time.monotonic()
        if isinstance(message, Busy):
            self.rank.set_busy(message.reason, now)
            self._reported_at = 0.0
            return
        if isinstance(message, Sampled):
            self.timers[self._report_flight] = now
            return
        if isinstance(message, Training):
            self.rank.begin_training(message, now)
            self.released = False
        elif isinstance(message, Raised):
            self.rank.raised_at = now
            self._reported_at = 0.0
        elif isinstance(message, Saved):
            self.rank.saved = message
        elif isinstance(message, Leaving):
            self.rank.leaving = message
        elif isinstance(message, Unwound):
            self.timers.pop(self._end_at_deadline, None)
            if self.kill in self.timers:
                self.timers[self.kill] += _SHUTDOWN_SECONDS
        elif isinstance(message, Exiting):
            self.rank.exiting = message
            self.rank.exiting_since = now
            return
        elif isinstance(message, Stacks) and self._late is not None:
            self._late_stacks = message.text
            self.timers[self._report_late_exit] = now
            return
        elif isinstance(message, Stacks):
            self.timers.pop(self._report_no_stacks, None)
        if not self.report(message) and isinstance(message, Leaving):
            self.send_to_rank(Release(all_leave=True))

    def send_to_rank(self, message: Message) -> bool:
        """Send ``message`` to the rank's process; return False if it is not connected."""
        if self.rank.connection is None:
            return False
        self.rank.connection.send(message)
        return True

    # ---- the coordinator --------------------------------------------------------------------------------------

    def report(self, message: Message) -> bool:
        """Send ``message`` to the coordinator; return False if it is not connected."""
        if self.uplink is None:
            return False
        self.uplink.send(message)
        return True

    @abstractmethod
    def handle_disconnect(self, *, is_cut_off: bool) -> None:
        """Handle the loss of the connection to the coordinator, whose host may have stopped answering."""

    def _disconnect(self, *, is_cut_off: bool) -> None:
        assert self.uplink is not None
        self.uplink.close()
        self.uplink = None
        self.handle_disconnect(is_cut_off=is_cut_off)

    def obey(self, order: Message) -> None:
        """Carry out an order of the coordinator."""
        now = time.monotonic()
        if isinstance(order, Signal):
            self.rank.end(order.number)
        elif isinstance(order, GiveStacks):
            self.timers[self._report_no_stacks] = now + _STACKS_SECONDS if self.send_to_rank(order) else now
        elif isinstance(order, GiveFlight):
            self._max_records = order.most
            will_answer = self.rank.stopped_at is None and self.send_to_rank(order)
            self.timers[self._report_flight] = now + _SAMPLE_SECONDS if will_answer else now
        elif isinstance(order, Release):
            self.released = True
            self.send_to_rank(order)
        elif isinstance(order, WriteLine):
            self.write_line(order.text)
        elif isinstance(order, End):
            self.end(order)

    @abstractmethod
    def write_line(self, text: str) -> None:
        """Write a line to the rank's standard error, without waiting for its reader."""

    def end(self, order: End) -> None:
        """Ask the rank to end itself; end it if it cannot or misses the deadline."""
        now = time.monotonic()
        self.order = order
        if self.rank.stopped_at is not None:
            self.timers[self.kill] = now
        elif self.rank.training is not None and self.send_to_rank(order):
            self.timers[self._end_at_deadline] = now + order.unwind
            self.timers[self.kill] = now + order.unwind + _KILL_SECONDS
            if self.rank.leaving is not None:
                self.timers[self.kill] += _SHUTDOWN_SECONDS
        else:
            self.rank.end(signal.SIGTERM)
            self.timers[self.kill] = now + _TERM_SECONDS

    # ---- deferred callbacks -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the rank."""
        self.rank.end(signal.SIGKILL)

    def _end_at_deadline(self) -> None:
        assert self.order is not None
        self.send_to_rank(End(code=self.order.code))

    def _report_flight(self) -> None:
        self.report(Flight(records=self.rank.records(self._max_records)))

    def _report_late_exit(self) -> None:
        """Write the stacks of a rank that does not exit; end the job if that is not the user's work."""
        late = self._late
        self._late = None
        if late is None or self.rank.has_ended:
            return
        cause = f"{late.doing} for {late.seconds:g} s after the end of its script (HVDKIT_EXIT_SECONDS)"
        text = self._late_stacks.rstrip("\n")
        if not late.is_bounded:
            line = f"hvdkit: rank {late.rank} has not exited: {cause}; the job waits as long as a rank works"
            write_line(tagged([late.rank], f"{text}\n{line}"))
        elif not self.report(Failed(cause=cause, verb="did not exit", text=text, step=self.rank.step)):
            write_line(f"{tagged([late.rank], text)}\nhvdkit: rank {late.rank} did not exit: {cause}")
            self.end(End(code=1))

    def _report_no_stacks(self) -> None:
        is_leaving = self.rank.leaving is not None
        why = "it no longer runs Python" if is_leaving else "it does not answer"
        self.report(Stacks(text=f"{why}, so its stacks are unknown", waiting=is_leaving))
