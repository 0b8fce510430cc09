"""The sentinel of a rank started by another launcher than ``hvdkit run``; ``hk.init()`` starts it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from functools import partial

from hvdkit.machine import processes
from hvdkit.watchdog.base import Sentinel
from hvdkit.watchdog.channel import Offer, Unreachable, connect
from hvdkit.watchdog.events import Connect, End, Exited, Joined, Left, Message
from hvdkit.watchdog.lines import Writer, write_line
from hvdkit.watchdog.rank_process import RankProcess

# Seconds for rank 0 to replace its sentinel; and if its process still holds the port: on a busy host, that takes
# longer, and programs without the token may use up the connections.
_RECONNECT_SECONDS = 5.0
_RECONNECT_ACCEPTED_SECONDS = 60.0
_RETRY_SECONDS = 0.2
# Seconds between attempts to join, if rank 0 could not be reached at the start.
_JOIN_AGAIN_SECONDS = 15.0
_LAST_SECONDS = 3.0
# How many times to read messages that the rank sent before its end.
_READS = 20
# Seconds before a warning about a rank that cannot connect.
_WARN_SECONDS = 1.0


class WatchingSentinel(Sentinel):
    """Watches a process that a launcher has started, at time ``started`` by the kernel's clock."""

    def __init__(self, pid: int, started: int, connected: socket.socket) -> None:
        super().__init__(RankProcess(pid))
        self._started = started
        self._has_left = False
        self._connect: Connect | None = None
        self._lines = Writer(2)  # this process has the rank's standard error
        self.attach_rank(connected)
        # Before Linux 5.3, or with Python built against an old C library, /proc is polled instead.
        with contextlib.suppress(OSError, AttributeError):
            self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, self._process_ended)

    def run(self) -> int:
        """Watch until the rank has ended."""
        while not self.rank.has_ended:
            self.turn()
            self.rank.has_ended |= processes.is_over(self.rank.pid, self._started)
        for _ in range(_READS):
            if self.rank.connection is not None:
                self.exchange_with_rank(selectors.EVENT_READ)
        code = 0 if self._has_left else self.rank.exit_status()
        self.report(Exited(code=code, step=self.rank.step, busy=self.rank.busy))
        until = time.monotonic() + _LAST_SECONDS
        # If the rank has failed, the coordinator requests its last collectives.
        while self.uplink is not None and time.monotonic() < until:
            if not self.uplink.unsent and (code == 0 or self.released):
                break
            self.turn(0.1)
        self._lines.finish(_LAST_SECONDS)
        return 0

    def write_line(self, text: str) -> None:
        """Write a line to standard error."""
        self._lines.line(text)

    def _process_ended(self, file: int) -> None:
        self.selector.unregister(file)
        self.rank.has_ended = True

    def handle(self, message: Message) -> None:
        """Handle a message of the rank, and report it."""
        if isinstance(message, Connect):
            self._connect = message
            place = processes.place()
            self.join(message, Joined(rank=message.rank, size=message.size, host=message.host, place=place))
        elif isinstance(message, Left):
            self.rank.has_ended = self._has_left = True
        else:
            super().handle(message)

    def join(self, connect_to: Connect, joined: Joined) -> None:
        """Join the coordinator of the job."""
        self._connect_again = partial(connect, Offer.parse(connect_to.offer), joined, self.selector, "uplink")
        try:
            self.uplink, self.welcome = self._connect_again()
        except ConnectionRefusedError as error:
            write_line(f"hvdkit: watchdog: rank {joined.rank} on {joined.host}: {error}")
        except OSError as error:
            warning = (
                f"hvdkit: watchdog: rank {joined.rank} on {joined.host} cannot reach rank 0 on {connect_to.chief_host} "
                f"({error}), so its failure may be noticed late or not at all; allow connections between ranks, or "
                "select the network with HOROVOD_GLOO_IFACE"
            )

            def warn() -> None:
                if self.rank.leaving is None:
                    write_line(warning)

            self.timers[warn] = time.monotonic() + _WARN_SECONDS
            self.timers[self._join_again] = time.monotonic() + _JOIN_AGAIN_SECONDS

    def _join_again(self) -> None:
        """Join a coordinator that could not be reached at the start: connections may have been used up by others."""
        if self.order is not None or self.rank.leaving is not None or self.rank.has_ended:
            return
        try:
            self._reconnect(_RECONNECT_SECONDS)
        except ConnectionRefusedError as error:
            write_line(f"hvdkit: watchdog: {error}")
        except OSError:
            self.timers[self._join_again] = time.monotonic() + _JOIN_AGAIN_SECONDS

    def _reconnect(self, seconds: float) -> None:
        """Connect again, and report what rank 0's sentinel does not know. Raises OSError as :func:`connect` does."""
        self.uplink, self.welcome = self._connect_again(seconds)
        for message in (self.rank.training, self.rank.saved, self.rank.leaving):
            if message is not None:
                self.report(message)

    def handle_disconnect(self, *, is_cut_off: bool) -> None:
        """Reconnect if rank 0's sentinel was only killed and is replaced; otherwise end this rank."""
        if self.order is not None or self.released or self._connect is None or self.rank.has_ended:
            return
        began = time.monotonic()
        limit = _RECONNECT_SECONDS
        while not is_cut_off and (remaining := began + limit - time.monotonic()) > _RETRY_SECONDS:
            time.sleep(_RETRY_SECONDS)
            process = processes.stat(self.rank.pid)
            if process is None or process.state in "ZX":
                break
            try:
                self._reconnect(min(remaining, _RECONNECT_SECONDS))
            except OSError as error:
                is_accepted = isinstance(error, Unreachable) and error.is_accepted
                limit = _RECONNECT_ACCEPTED_SECONDS if is_accepted else _RECONNECT_SECONDS
                continue
            return
        if self._connect.speaks:
            step = "" if self.rank.step is None else f" at step {self.rank.step}"
            cause = "its host is down, the network is cut, or its sentinel was killed"
            saved = "" if self.rank.saved is None else f"; {self.rank.saved.text}"
            write_line(f"hvdkit: rank 0 on {self._connect.chief_host} is unreachable{step} ({cause}){saved}")
        self.end(End(code=1))
