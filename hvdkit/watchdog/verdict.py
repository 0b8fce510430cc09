"""Finds which rank failed first and why, and the job's exit code. Pure: maps events to the last line."""

from __future__ import annotations

import bisect
import math
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdkit.watchdog.events import Exited, Failed, Leaving, Message, Training
from hvdkit.watchdog.rank_texts import alike, tagged

PREEMPTED = 75
_SAME_CALLS = "; every rank must make the same calls: see `hvdkit docs pitfalls#only-the-chief-enters-a-collective`"
AS_EVERY_RANK = ", as every rank did"
_CONTINUES = "; the same command continues it"
ASKED = f"it was asked to stop{_CONTINUES}"
DIED = "died without reporting an error (killed, out of memory, or os._exit)"
# An error caused by the end of a rank may be reported up to this many seconds before that end.
_CROSSING_SECONDS = 1.0
_HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGABRT: " (a failed check in native code)",
}


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """The rank's sentinel was connected at this time, and had not reported the rank's end."""


@dataclass(frozen=True, kw_only=True)
class Lost(Message):
    """The connection to the rank's sentinel has ended before the sentinel reported the rank's end."""


@dataclass(frozen=True, kw_only=True)
class Judged(Failed):
    """The coordinator has found that the rank cannot continue, although it did not report an error."""

    dead: bool = False  # its process cannot exit normally


class Blame(NamedTuple):
    """A rank that cannot continue: what has been found, and since when, in seconds of the coordinator's clock."""

    rank: int
    judged: Judged
    since: float


@dataclass(frozen=True)
class RankEvent:
    """One event of a rank.

    Attributes:
        time: when it happened, as far as is known, by the coordinator's clock in seconds.
        ordered: whether it results from an order of the coordinator, or from a signal to the job.
    """

    rank: int
    time: float
    event: Message
    ordered: bool = False


@dataclass(frozen=True)
class Verdict:
    """How the job ended.

    Attributes:
        code: its exit code.
        summary: what the rank did, without its number and host; without a ``rank``, what is known. Empty: success.
        rank: the rank that failed first; None if unknown, or after success.
        host: its host.
        step: steps it had trained.
        texts: tracebacks, each tagged with the ranks that reported it, that of ``rank`` last.
        orderly: whether all ranks can exit normally.
        common: whether every rank reported its own error: none has waited for another one.
        final: the job was stopped, and must not be restarted.
        flight: the line about the flight recorder's file, or "".
        saved: what the job has saved and where the same command continues, or "".
    """

    code: int
    summary: str = ""
    rank: int | None = None
    host: str = ""
    step: int | None = None
    texts: tuple[str, ...] = ()
    orderly: bool = False
    common: bool = False
    final: bool = False
    flight: str = ""
    saved: str = ""

    @property
    def line(self) -> str:
        """The rank, its host and what it did, in one line."""
        return self.summary if self.rank is None else f"rank {self.rank} on {self.host} {self.summary}"

    @property
    def last_line(self) -> str:
        """The line and, after a failure, what the job has saved."""
        if not self.code or not self.saved:
            return self.line
        return f"{self.line.replace(_CONTINUES, '')}; {self.saved}"


def is_failure(one: RankEvent, have_left: Collection[int]) -> bool:
    """Return True for an event that must end the job even if it is unknown which rank failed first.

    ``have_left`` are the ranks whose scripts have ended.
    """
    if isinstance(one.event, Exited):  # after the script's end, an unknown exit code does not count as a failure
        return one.event.code != 0 and (one.event.code is not None or one.rank not in have_left)
    return not one.ordered and isinstance(one.event, (Failed, Lost))


def verdict(events: Iterable[RankEvent], size: int, hosts: Mapping[int, str] = {}) -> Verdict:
    """Return the verdict: which rank failed first, and how.

    A rank is named only if all other ranks are known not to have failed earlier. Missing events make the verdict
    "unknown", but never blame a healthy rank. The order of the events does not matter, only their times. Events that
    result from an order to end never count as the first failure.

    Example:
        >>> one = RankEvent(1, 4.0, Failed(cause="ValueError: bad", step=7))
        >>> verdict([one, RankEvent(0, 4.1, Alive())], size=2, hosts={1: "b"}).line
        'rank 1 on b failed at step 7: ValueError: bad'
    """
    by_rank: dict[int, list[RankEvent]] = {rank: [] for rank in range(size)}
    for one in events:
        if one.rank in by_rank:
            by_rank[one.rank].append(one)
    histories = [_History(rank, rank_events) for rank, rank_events in by_rank.items()]
    if all(one.exited is not None and one.exited.code == 0 for one in histories):
        return Verdict(0)
    all_left = all(Leaving in one.first for one in histories)
    all_events = (event for history in histories for event in history.events)
    victims = sorted((one.time, one.rank) for one in all_events if getattr(one.event, "follows", False))
    candidates = (candidate for one in histories for candidate in one.candidates(all_left, victims))
    first = min(candidates, key=lambda one: (one.time, one.since), default=None)
    raised = {
        one.rank: one.failed.text for one in histories if one.failed and one.failed.text and not one.failed.follows
    }
    groups = alike(raised)
    if first is None or not all(one.well_until >= first.time for one in histories if one.rank != first.rank):
        return _unknown(histories, tuple(tagged(ranks, raised[ranks[0]]) for ranks in groups))
    blame = first.blame
    step = blame.step
    if step is None:  # ranks step together
        step = max((one.step for one in histories if one.step is not None), default=None)
    groups.sort(key=lambda ranks: first.rank in ranks)
    return Verdict(
        blame.code,
        _summarize(blame, step, of_every_rank=len(groups) == 1 and len(raised) == size > 1),
        first.rank,
        hosts.get(first.rank, ""),
        step,
        texts=tuple(tagged(ranks, raised[ranks[0]]) for ranks in groups),
        orderly=not any(one.is_dead for one in histories),
        common=len(raised) == size,
    )


def _unknown(histories: Sequence[_History], texts: tuple[str, ...]) -> Verdict:
    """Return the verdict for the case that the first failure is unknown."""
    code = next((shell_code(one.exited.code) for one in histories if one.exited is not None and one.exited.code), None)
    summary = "it is not known which rank failed first"
    reports = [(one.failed.follows, one.first[Failed].time, one.rank, one.failed) for one in histories if one.failed]
    if not reports:
        return Verdict(code or 1, summary, texts=texts)
    follows, _, rank, failed = min(reports)
    code = failed.code if not follows or code is None else code
    if not texts and failed.text:
        texts = (tagged([rank], failed.text),)
    return Verdict(code, f"{summary}; rank {rank} reported: {failed.cause}", texts=texts)


def _summarize(blame: Failed, step: int | None, *, of_every_rank: bool) -> str:
    at = "" if step is None else f" at step {step}"
    others = AS_EVERY_RANK if of_every_rank else ""
    cause = f": {blame.cause}" if blame.cause else ""
    busy = f" (busy: {blame.busy})" if blame.busy else ""
    return f"{blame.verb}{at}{others}{cause}{busy}"


@dataclass(frozen=True)
class _Candidate:
    """A rank that may have failed first, at ``time``. ``since`` is when the cause occurred, and breaks ties."""

    rank: int
    time: float
    blame: Failed
    since: float = 0.0


class _History:
    """The events of one rank.

    Attributes:
        events: the events, sorted by time.
        first: the first event of each kind.
        failed: its first error, or None.
        exited: how its process ended, or None.
        step: steps trained, or None.
        well_until: the last time at which it had certainly not failed.
        is_dead: whether its process did not, or cannot, exit normally.
    """

    def __init__(self, rank: int, events: Iterable[RankEvent]) -> None:
        self.rank = rank
        self.events = sorted(events, key=lambda event: event.time)
        self.first = {type(one.event): one for one in reversed(self.events)}
        messages = [one.event for one in self.events]
        self.failed = next((message for message in messages if type(message) is Failed), None)
        self.exited = next((message for message in reversed(messages) if isinstance(message, Exited)), None)
        steps = [step for message in messages if isinstance(step := getattr(message, "step", None), int)]
        self.step = max(steps, default=None)
        ended_well = self.exited is not None and self.exited.code == 0 and self.failed is None
        self.well_until = math.inf if ended_well else max((one.time for one in self.events), default=-math.inf)
        ended_abruptly = self.exited is not None and self.failed is None and Leaving not in self.first
        is_judged_dead = any(isinstance(message, Judged) and message.dead for message in messages)
        self.is_dead = Lost in self.first or is_judged_dead or ended_abruptly

    def candidates(self, all_left: bool, victims: Sequence[tuple[float, int]]) -> Iterator[_Candidate]:
        """Yield the possible failures of this rank.

        ``all_left``: the scripts of all ranks have ended. ``victims``: sorted time and rank of the reported errors that
        were caused by another rank.
        """
        leaving = self.first.get(Leaving)
        for one in self.events:
            event = one.event
            if one.ordered:
                continue
            if isinstance(event, Failed) and not event.follows:
                yield _Candidate(self.rank, one.time, event)
            elif isinstance(event, Lost):
                why = "is unreachable (its host is down, the network is cut, or its sentinel was killed)"
                yield _Candidate(self.rank, one.time, Judged(cause="", verb=why))
            elif isinstance(event, Exited) and self.failed is None and leaving is None:
                yield from self._abrupt_end(one.time, event)
        if leaving is not None and not leaving.ordered and self.failed is None:
            yield from self._early_end(leaving, all_left, victims)

    def _abrupt_end(self, time: float, end: Exited) -> Iterator[_Candidate]:
        """Yield the failure of a process that ended without announcing it."""
        step = end.step
        busy = end.busy
        if end.stopped is not None:
            time = time - end.stopped
            stopped = f"was stopped (SIGSTOP) for {end.stopped:.0f} s"
            judged = Judged(cause="", verb=stopped, code=137, step=step, busy=busy)
        elif end.code is None or (end.code == 0 and Training in self.first):
            judged = Judged(cause=DIED, code=137 if end.code is None else 1, step=step, busy=busy)
        elif end.code:
            judged = Judged(cause="", verb=how(end.code), code=shell_code(end.code), step=step, busy=busy)
        else:
            return
        yield _Candidate(self.rank, time, judged)

    def _early_end(
        self, leaving: RankEvent, all_left: bool, victims: Sequence[tuple[float, int]]
    ) -> Iterator[_Candidate]:
        """Yield the failure of a rank whose script ended: its exit code, or that another rank still needed it."""
        time = leaving.time
        since = 0.0
        code = self.exited.code if self.exited is not None else 0
        if code == -signal.SIGKILL and any(one.ordered for one in self.events if one.event is self.exited):
            code = 0  # killed by its sentinel because another rank had failed
        step = getattr(leaving.event, "step", None)
        if code and (code < 0 or all_left):
            cause = ASKED if code == PREEMPTED else ""
            judged = Judged(cause=cause, verb=how(code), code=shell_code(code), step=step)
        elif code:
            judged = Judged(cause=f"sys.exit({code}) while other ranks continued", code=code, step=step)
        else:
            after = bisect.bisect_left(victims, (time, -1))
            before = bisect.bisect_left(victims, (time - _CROSSING_SECONDS, -1))
            if after < len(victims):
                # until then another rank may have failed
                since = time
                time, other = victims[after]
            elif before < len(victims):
                since = time
                time = time + _CROSSING_SECONDS
                other = victims[before][1]
            else:  # no other rank needed it any more
                return
            needed = f"ended before the others: rank {other} still needed it{_SAME_CALLS}"
            judged = Judged(cause=needed, verb="left the job", code=1, step=step)
        yield _Candidate(self.rank, time, judged, since)


def how(code: int) -> str:
    """Describe how a program ended.

    Example:
        >>> how(3), how(-11)
        ('ended with exit code 3', 'was killed by SIGSEGV (a crash in native code)')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    return f"was killed by {number.name}{_HINTS.get(number, '')}"


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 plus the signal's number for a signal.

    Example:
        >>> shell_code(3), shell_code(-9)
        (3, 137)
    """
    return code if code >= 0 else 128 - code
