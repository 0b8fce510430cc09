"""Ranks that leave a job, and when each of them may end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdkit.watchdog.events import Leaving, Release
from hvdkit.watchdog.member import Member

# Seconds that a leaving rank waits for the others to leave as well.
LEAVE_SECONDS = 2.0
# Seconds for which another rank waits for one that has left but keeps Horovod running, or all others are idle.
_NEEDED_SECONDS = 8.0
# Seconds between checks of whether such a rank is needed.
_CHECK_SECONDS = 0.5


class LeavingRanks:
    """The ranks whose scripts have ended, or that have called ``hk.shutdown()``.

    A rank that ends shuts Horovod down for all ranks. Ranks are therefore released together once all have left. A rank
    whose script has ended is released after 2 s at the latest. One that keeps Horovod running is released earlier only
    if another rank waits for it, or all others are idle: their collective then fails instead of waiting forever.

    Args:
        running: the running ranks, which the coordinator keeps up to date.
        record: called when a rank's script counts as ended, with the rank, its message and the time.
    """

    def __init__(self, running: Mapping[int, Member], record: Callable[[Member, Leaving, float], None]) -> None:
        self._running = running
        self._record = record
        self._waiting: dict[int, Member] = {}  # not released yet, in the order in which they left
        self._ended: set[int] = set()  # ranks whose scripts count as ended
        self._checked_at = 0.0

    @property
    def have_ended(self) -> bool:
        """Whether the script of any rank has ended."""
        return bool(self._ended)

    def add(self, member: Member, message: Leaving, now: float) -> None:
        """Note that a rank leaves."""
        self._waiting[member.rank] = member
        if message.keeps_horovod:
            member.holding = message
            member.held_since = now
        else:
            self._end_script(member, message, now)

    def trains_again(self, member: Member) -> None:
        """Note that a rank trains again, in a second world of the same process."""
        self._waiting.pop(member.rank, None)
        self._ended.discard(member.rank)

    def has_stopped(self, member: Member) -> None:
        """Note that a rank no longer runs."""
        self._waiting.pop(member.rank, None)

    def release(self, now: float, *, all_joined: bool) -> None:
        """Release all ranks once all have left, otherwise those that have waited long enough or are needed."""
        all_leave = all_joined and len(self._waiting) == len(self._running)
        while self._waiting:
            member = next(iter(self._waiting.values())) if all_leave else self._next(now)
            if member is None:
                return
            del self._waiting[member.rank]
            if member.holding is not None:
                self._end_script(member, member.holding, now)
            member.released = Release(all_leave=all_leave)
            member.send(member.released)

    def _next(self, now: float) -> Member | None:
        """Return a rank that other ranks may be waiting for, which learn it as soon as Horovod shuts down, or None."""
        first = next(iter(self._waiting.values()))
        if first.holding is None:  # without process sets, the others wait for it at their next collective
            has_waited = now - (first.script_ended_at or now) > LEAVE_SECONDS
            return first if has_waited else None
        if now < self._checked_at + _CHECK_SECONDS:
            return None
        self._checked_at = now
        waiting = reversed(self._waiting.values())
        holding = [member for member in waiting if member.holding is not None]  # the last that left first
        left_at = holding[0].held_since
        others = [one for one in self._running.values() if one.holding is None and one.script_ended_at is None]
        idle = [one for one in others if one.idle_since(left_at) > _NEEDED_SECONDS]
        for waits in (record for one in idle for record in one.waits):
            for member in holding:
                if waits.participants is None or member.rank in waits.participants:
                    return member
        return holding[0] if len(idle) == len(others) and now - left_at > _NEEDED_SECONDS else None

    def _end_script(self, member: Member, message: Leaving, now: float) -> None:
        member.script_ended_at = now
        self._ended.add(member.rank)
        self._record(member, message, now)
