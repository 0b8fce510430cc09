"""Ranks that wait in a collective for ranks that may never come: reports, and ranks that left by an exception."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hvdkit.watchdog.member import Member
from hvdkit.watchdog.rank_texts import tagged

# Seconds of waiting after which a rank that has left by an exception is blamed. Until then the waiting ranks may raise
# the same exception.
_LEFT_SECONDS = 5.0
# Seconds of waiting until the first report; each further one comes after twice the time. Maximum number of lines.
_REPORT_SECONDS = 30.0
_MOST_LINES = 16
# Seconds without progress after which a report calls a rank idle.
_IDLE_SECONDS = 5.0


class Deserter(NamedTuple):
    """A rank that has left the others by an exception: its ``member``, the ``cause`` in one line, and the traceback."""

    member: Member
    cause: str
    text: str


class LeftBehind:
    """Ranks that have waited for some seconds, and those that they wait for, among the coordinator's running ranks."""

    def __init__(self, running: Mapping[int, Member]) -> None:
        self._running = running
        self._waiting: dict[int, float] = {}  # since when each rank waits where it is, the earliest first
        self._places: dict[int, list[tuple[str, float]]] = {}  # key and start of the collectives in which each waits
        self._raised: dict[int, Member] = {}
        self._next_report = _REPORT_SECONDS

    def note(self, member: Member, now: float) -> None:
        """Record a new status of a rank."""
        place = [(one.key, one.start) for one in member.waits]
        if place != self._places.get(member.rank, []):
            self.has_stopped(member)
            if place:
                self._waiting[member.rank] = now
                self._places[member.rank] = place
        if member.raised is None:
            self._raised.pop(member.rank, None)
        else:
            self._raised[member.rank] = member

    def has_stopped(self, member: Member) -> None:
        """Note that a rank no longer runs, or no longer waits where it did."""
        self._waiting.pop(member.rank, None)
        self._places.pop(member.rank, None)
        self._raised.pop(member.rank, None)
        if not self._waiting:
            self._next_report = _REPORT_SECONDS

    def by_exception(self, now: float) -> Deserter | None:
        """Return a rank that left by an exception while another rank, which raised none, waits for it; or None."""
        raised = sorted(self._raised.values(), key=lambda one: one.raised_at)
        if not raised or now - raised[0].raised_at < _LEFT_SECONDS:
            return None
        for rank, since in self._waiting.items():
            waiting = self._running[rank]
            if now - since < _LEFT_SECONDS:
                return None
            for member in raised:
                if member.raised is None or member.status.busy or waiting.raised is not None:
                    continue
                if _needs(waiting, member):
                    cause = f"{member.raised.cause} (caught by the program; rank {rank} waits in {waiting.waits[0]})"
                    return Deserter(member, cause, tagged([member.rank], member.raised.text))
        return None

    def report(self, now: float) -> Iterator[tuple[int, str]]:
        """Yield ranks with their lines about who waits where and for whom, if ranks have waited long since the last."""
        longest = now - next(iter(self._waiting.values()), now)
        if longest < self._next_report:
            return
        self._next_report = 2 * longest
        ranks = sorted(self._running)
        for rank in ranks[:_MOST_LINES]:
            yield rank, f"[rank {rank}] {self._describe(rank, now)}"
        if len(ranks) > _MOST_LINES:
            number = len(ranks) - _MOST_LINES
            yield ranks[0], f"hvdkit: {len(self._waiting)} of {len(ranks)} ranks wait; {number} are left out"

    def _describe(self, rank: int, now: float) -> str:
        member = self._running[rank]
        host = f" (on {member.joined.host})"
        if rank not in self._waiting:
            last = f"; its last one was {member.status.last}" if member.status.last else ""
            return f"{self._describe_missing(member)}{last}{host}"
        record = member.waits[0]
        missing = [other for other, one in self._running.items() if all(each.key != record.key for each in one.waits)]
        awaited = sorted(other for other in missing if not record.participants or other in record.participants)
        names = f" for rank {', '.join(map(str, awaited[:4]))}{', ...' * (len(awaited) > 4)}" if awaited else ""
        first = f"; rank {awaited[0]} {self._describe_missing(self._running[awaited[0]])}" if awaited else ""
        return f"has waited{names} for {now - self._waiting[rank]:.0f} s in {record}{host}{first}"

    def _describe_missing(self, member: Member) -> str:
        """Describe what a rank does that has not entered a collective in which others wait."""
        if member.waits:
            return f"waits in {member.waits[0]}"
        does = "idle" if member.status.idle > _IDLE_SECONDS else "working"
        does = f"busy: {member.status.busy}" if member.status.busy else does
        raised = f"; it has raised {member.raised.cause}" if member.raised is not None else ""
        leaves = "; its program has ended" if member.script_ended_at is not None or member.holding else ""
        return f"is in no collective ({does}){raised}{leaves}"


def _needs(waiting: Member, other: Member) -> bool:
    """Return True if a rank waits in a collective in which the other one takes part, and which it has not entered."""
    keys = {one.key for one in other.waits}
    if waiting.status.waits is not None and waiting.status.count <= other.status.count and not other.waits:
        return False  # the other rank has begun, and completed, the same number of eager collectives
    return any(
        one.key not in keys and (one.participants is None or other.rank in one.participants) for one in waiting.waits
    )
