"""Ranks that have been idle for longer than the watchdog allows, and the one that holds up the job."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.watchdog.events import GiveStacks, Stacks, Status
from hvdkit.watchdog.job_end import TEXTS
from hvdkit.watchdog.lines import Lines
from hvdkit.watchdog.member import Member
from hvdkit.watchdog.rank_texts import alike, tagged
from hvdkit.watchdog.verdict import Blame, Judged

# Limit for ranks that wait for a working rank, e.g. for a download on the chief; a multiple of the watchdog's limit.
_WAITING_FACTOR = 6
_STACKS_SECONDS = 3.0
_HEADER_END = "its stacks, most recent call first:"


class HungRanks:
    """Finds a rank that hangs, once all running ranks have been idle for too long: ``patience`` in seconds, 0 never."""

    def __init__(self, running: Mapping[int, Member], patience: float, lines: Lines) -> None:
        self._running = running
        self._patience = patience
        self._lines = lines
        self._longest_idle: Member | None = None  # the rank that has been idle longest, and longer than allowed
        self._hung: Member | None = None  # the one for which stacks have been requested
        self._stacks_due: float | None = None

    def note(self, member: Member) -> None:
        """Record a new status of a rank."""
        status = member.status
        if not self._patience or not member.is_running or not (status.is_late or status.idle > self._patience):
            return
        longest = None if self._longest_idle is None else self._longest_idle.status
        if longest is None or (not longest.is_late, longest.idle) < (not status.is_late, status.idle):
            self._longest_idle = member

    def check(self, now: float, *, has_all: bool) -> Blame | None:
        """Request all stacks if a rank has been idle for too long; once they are here, return the rank that hangs.

        ``has_all``: all ranks of the job have joined, and none is without a sentinel.
        """
        if self._stacks_due is not None:
            if now < self._stacks_due and any(member.stacks is None for member in self._running.values()):
                return None
            self._stacks_due = None
            hung = self._hung  # it may have gone on, or ended, meanwhile
            return self._blame(hung, now) if hung is not None and self._is_hung(hung, has_all) else None
        longest = self._longest_idle
        self._longest_idle = None
        if longest is not None and self._is_hung(longest, has_all):
            self._hung = longest
            self._stacks_due = now + _STACKS_SECONDS
            for member in self._running.values():
                member.stacks = None
                member.send(GiveStacks())
        return None

    def _is_hung(self, member: Member, has_all: bool) -> bool:
        """Return True if a rank has been idle for too long, and no rank works that it may be waiting for."""
        if self._running.get(member.rank) is not member:
            return False
        status = member.status
        running = self._running.values()
        is_long = not status.is_late and status.idle > _WAITING_FACTOR * self._patience
        if not is_long and (has_all or not status.is_late):
            is_long = all(one.status.is_late or one.status.idle > self._patience for one in running)
        return is_long and not any(one.status.busy for one in running)

    def _blame(self, longest: Member, now: float) -> Blame:
        """Blame the rank that is furthest behind: the others wait for it, ``longest`` for the longest time."""
        stacks = {rank: member.stacks for rank, member in self._running.items() if member.stacks is not None}
        status = {rank: member.status for rank, member in self._running.items()}
        culprit = furthest_behind(status, stacks, longest.rank)
        idle = longest.status.idle
        where = f" ({stacks[culprit].where})" if culprit in stacks and stacks[culprit].where else ""
        shown = sorted(stacks, key=lambda rank: (rank != culprit, rank))[:TEXTS]
        texts = stack_texts({rank: stacks[rank] for rank in shown})
        if len(stacks) > TEXTS:
            texts.append(f"hvdkit: the stacks of {len(stacks) - TEXTS} more ranks are left out")
        for text in texts:
            self._lines.line(text)
        whose = f"{TEXTS}" if len(stacks) > TEXTS else "all"
        cause = f"no progress for {idle:.0f} s{where}; the stacks of {whose} ranks are above"
        verb = "did not exit" if status[culprit].is_late else "hangs"
        return Blame(culprit, Judged(cause=cause, verb=verb, dead=True), now - idle)


def furthest_behind(status: Mapping[int, Status], stacks: Mapping[int, Stacks], idle_longest: int) -> int:
    """Return the rank that is furthest behind: the others wait for it.

    Ranks are compared by steps, then by eager collectives begun; on a tie, a rank outside of a collective is behind one
    that waits in it. If all that have sent ``stacks`` are equal, return the rank that has been idle longest.
    """

    def progress(rank: int) -> tuple[int, int, bool]:
        return status[rank].step or 0, status[rank].count, stacks[rank].waiting

    last = min(sorted(stacks), key=progress, default=idle_longest)
    return idle_longest if not stacks or progress(last) == max(map(progress, stacks)) else last


def stack_texts(stacks: Mapping[int, Stacks]) -> list[str]:
    """Return the stacks of all ranks in rank order, tagged with the rank; identical stacks are included once.

    Example:
        >>> same = Stacks(text="its stacks, most recent call first:\\nf")
        >>> stack_texts({0: same, 1: same})[1]
        '[rank 1] its stacks are the same as those of rank 0'
    """
    first_alike: dict[int, int] = {}
    for ranks in alike({rank: one.text.partition("\n")[2] for rank, one in stacks.items()}):
        first_alike |= dict.fromkeys(ranks, ranks[0])
    texts = []
    for rank in sorted(stacks):
        text = stacks[rank].text
        header, _, body = text.partition("\n")
        if body and rank != first_alike[rank]:
            text = header.replace(_HEADER_END, f"its stacks are the same as those of rank {first_alike[rank]}")
        texts.append(tagged([rank], text))
    return texts
