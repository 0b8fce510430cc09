"""Ranks whose sentinels do not answer or are gone, and ranks that are stopped while others run."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import takewhile

from hvdkit.machine import processes
from hvdkit.watchdog.member import Member
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.verdict import Blame, Judged

# Limits for a silent sentinel, in heartbeats: on this host, where the kernel knows whether the rank is stopped, and on
# another one that still acknowledges packets: there, the sentinel may be waiting for a core, for memory or for a disk.
_SILENT_HERE_FACTOR = 1.5
_SILENT_FACTOR = 6
# Seconds for a rank to replace its killed sentinel.
_REPLACE_SECONDS = 5.0
# The same for a rank of this host whose process is alive: on a busy host, starting a process takes long.
_REPLACE_HERE_SECONDS = 60.0


class SilentRanks:
    """The ranks that have not been heard of for too long.

    Args:
        running: running ranks with a sentinel in the order of their last messages, which the coordinator keeps.
        settings: the watchdog's.
    """

    def __init__(self, running: OrderedDict[int, Member], settings: WatchdogSettings) -> None:
        self._running = running
        self._settings = settings
        self._stopped: dict[int, Member] = {}
        self._suspended_at = 0.0  # when all ranks were last seen stopped

    def note(self, member: Member) -> None:
        """Record a new status of a rank."""
        if member.status.stopped is None:
            self._stopped.pop(member.rank, None)
        else:
            self._stopped[member.rank] = member

    def has_ended(self, member: Member) -> None:
        """Note that a rank no longer runs."""
        self._stopped.pop(member.rank, None)

    def postpone(self, seconds: float) -> None:
        """Count silence from ``seconds`` later on: no message could arrive."""
        for member in self._running.values():
            member.last_heard += seconds

    def silent(self, now: float) -> Iterator[Blame]:
        """Yield the ranks whose sentinels must be given up."""
        limit = self._settings.heartbeat
        if not limit or not self._running:
            return
        # A job that was suspended together with its sentinels will resume. The kernel reports hosts that are down.
        shortest_silence = now - next(reversed(self._running.values())).last_heard
        if shortest_silence > limit:
            self.postpone(shortest_silence)
        for member in list(takewhile(lambda one: now - one.last_heard > limit, self._running.values())):
            silent = now - member.last_heard
            if member.peer is None or _state_here(member) not in ("", "T"):
                continue
            if silent > self._longest_silence(member) or member.peer.connection.is_cut_off(limit / 2):
                why = f"has not answered for {silent:.0f} s: its host is cut off, or it was stopped with its sentinel"
                yield Blame(member.rank, Judged(cause=why, dead=True), member.last_heard)

    def _longest_silence(self, member: Member) -> float:
        limit = self._settings.heartbeat
        if member.is_here:
            return _SILENT_HERE_FACTOR * limit
        # Less than the limit for hangs, which would blame a rank that waits for the silent one.
        patience = self._settings.patience or math.inf
        return max(_SILENT_HERE_FACTOR * limit, min(_SILENT_FACTOR * limit, patience / 2))

    def stopped(self, now: float) -> Iterator[Blame]:
        """Yield ranks that are stopped while others run. A job that is suspended as a whole will resume."""
        if not self._stopped or not self._settings.heartbeat:
            return
        if self._stopped.keys() >= self._running.keys():
            self._suspended_at = now
            return
        for rank, member in sorted(self._stopped.items()):
            seconds = (member.status.stopped or 0.0) + now - member.last_heard
            # The ranks of a suspended job resume one after another.
            if min(seconds, now - self._suspended_at) > self._settings.heartbeat:
                why = f"has been stopped (SIGSTOP) for {seconds:.0f} s"
                yield Blame(rank, Judged(cause=why, code=137, dead=True, busy=member.status.busy), now - seconds)


def not_replaced(lost: Mapping[int, Member], now: float) -> list[Member]:
    """Return those of the ranks whose sentinels are gone that have not got a new one in time."""
    late = []
    for member in lost.values():
        limit = _REPLACE_HERE_SECONDS if _state_here(member) else _REPLACE_SECONDS
        if now - (member.lost_at or now) > limit:
            late.append(member)
    return late


def of_lost_hosts(lost: Mapping[int, Member], running: Mapping[int, Member]) -> list[Member]:
    """Return the ranks of other hosts on which all sentinels are gone: none was only killed."""
    places = {member.joined.place for member in running.values()}
    return [member for member in lost.values() if not member.is_here and member.joined.place not in places]


def _state_here(member: Member) -> str:
    """Return the state of a rank's process, one letter, if it lives on this host; otherwise "".

    Silence of such a rank's sentinel means that the sentinel gets no core, because the kernel reports its end.
    """
    if member.pid is None or not member.is_here:
        return ""
    process = processes.stat(member.pid)
    return "" if process is None or process.state in "ZX" else process.state
