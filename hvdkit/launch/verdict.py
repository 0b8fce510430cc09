"""Which rank failed first, what that makes the exit code of the job, and its last line. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from hvdkit.cluster.report import FailureReport

# What Open MPI's mpirun says of a rank that called MPI_Abort: it ends all wrappers at once, and says so nowhere else.
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+).*?errorcode (-?\d+)", re.DOTALL)
_ENDED_BY_OTHERS = {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL}
_HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGABRT: " (a failed check in native code)",
}
PREEMPTED, OUT_OF_REACH = 75, 1


@dataclass
class Rank:
    """What is known of one rank.

    Attributes:
        host: where it runs, by its own word.
        code: its program's exit code, negative for a signal; None while it runs, or where it was lost.
        lost: its wrapper's connection broke.
        ended_by_us: it was told to end after another's failure, or after a signal to the job.
        follows: it said itself that it fails because another rank does.
        stopped: it was ended since it had been stopped (SIGSTOP) for too long.
    """

    host: str = ""
    code: int | None = None
    lost: bool = False
    ended_by_us: bool = False
    follows: bool = False
    stopped: bool = False

    @property
    def over(self) -> bool:
        return self.lost or self.code is not None

    @property
    def failed(self) -> bool:
        return self.lost or self.code not in (None, 0)


@dataclass
class Course:
    """The course of one attempt, event by event; :meth:`verdict` judges it in the end."""

    size: int
    engine: str
    ranks: dict[int, Rank] = field(default_factory=dict)
    first: int | None = None
    report: FailureReport | None = None
    stopped_by: signal.Signals | None = None
    # SIGUSR1 or SIGUSR2 was passed on, or Slurm has signalled a rank itself: schedulers announce the end of a job so.
    notified: bool = False
    # It was ended after all ranks: its exit code says nothing then, and neither do the seconds that a large job needs.
    engine_ended_by_us: bool = False
    engine_lines: list[str] = field(default_factory=list)
    # Counted as ranks end, so that an end costs the same whatever their number: the ranks that are over, and the exit
    # codes of those that failed and were not ended after another.
    _over: int = 0
    _failures: set[int | None] = field(default_factory=set)

    def began(self, rank: int, host: str) -> None:
        self.ranks[rank] = Rank(host)

    def said(self, rank: int, report: FailureReport) -> None:
        """Note which rank failed and why, by the first report that ``rank`` or another one hands over.

        A rank that reports another one has heard all of them (the watchdog): it knows better than the order in which
        their ends became known here. One that reports itself may have been let down by the first.
        """
        if self.report is not None:
            return
        if report.follows and report.rank == rank:
            self.ranks[rank].follows = True
        elif report.rank in self.ranks and (report.rank != rank or self.first in (None, rank)):
            self.first, self.report = report.rank, report

    def ended(self, rank: int, code: int, signals: list[int], stopped: bool = False) -> None:
        """Note the end of a rank's program.

        Args:
            rank: its number.
            code: its exit code, negative for a signal.
            signals: that reached its wrapper from others than ``hvdkit run``.
            stopped: it stood still (SIGSTOP), and was ended for it.
        """
        one = self.ranks[rank]
        one.code, one.stopped = code, stopped
        self.notified = self.notified or bool(signals)
        one.ended_by_us = one.ended_by_us or (bool(signals) and code in _ENDED_BY_OTHERS)
        self._first(rank)

    def lost(self, rank: int) -> None:
        self.ranks[rank].lost = True
        self._first(rank)

    def _first(self, rank: int) -> None:
        one = self.ranks[rank]
        self._over += 1
        if one.failed and not one.ended_by_us:
            self._failures.add(one.code)
        if self.first is None and self.stopped_by is None and one.failed and not (one.ended_by_us or one.follows):
            self.first = rank

    @property
    def failing(self) -> bool:
        """Say whether some rank has ended badly, so that the rest cannot go on."""
        return self.stopped_by is None and bool(self._failures)

    @property
    def saving(self) -> bool:
        """Say whether the ranks that have ended did so to go on later, so that the others are about to."""
        return self._failures == {PREEMPTED}

    def _failed_by_themselves(self) -> list[int]:
        return [rank for rank, one in self.ranks.items() if one.failed and not one.ended_by_us]

    @property
    def over(self) -> bool:
        """Say whether every rank has come and gone."""
        return self._over == self.size

    def verdict(self, engine_code: int, seconds: float) -> Verdict:
        """Judge how the attempt ended, once the engine has ended with ``engine_code``."""
        tail = f"; the job ended after {seconds:.1f} s"
        if self.stopped_by is not None:
            return self._stopped(tail)
        if self.over and all(rank.code == 0 for rank in self.ranks.values()):  # whatever else was reported
            unusual = engine_code != 0 and not self.engine_ended_by_us
            words = f"{self.engine} ended with exit code {engine_code} after all ranks had ended with 0{tail}"
            return Verdict(0, words if unusual else "")
        aborted = None
        if self.first is None and (found := _ABORTED.search("\n".join(self.engine_lines))):
            self.first = int(found[1]) if int(found[1]) in self.ranks else None
            if self.first is not None:
                code = int(found[2]) & 0xFF or 1
                self.ranks[self.first].code, aborted = code, f"called MPI_Abort with {code}"
        failed = [self.first] if self.first is not None else self._failed_by_themselves()
        if failed:
            return self._failed(failed[0], engine_code, tail, aborted)
        missing = [rank for rank in range(self.size) if rank not in self.ranks]
        unfinished = [rank for rank, one in sorted(self.ranks.items()) if one.code != 0]
        if missing and not self.ranks:
            what = f"{self.engine} ended with exit code {engine_code} before any rank began"
        elif missing:
            what = f"of {self.size} ranks {', '.join(map(str, missing))} never began"
        else:
            rank = unfinished[0]
            what = f"rank {rank} on {self.ranks[rank].host} {how(self.ranks[rank].code)}"
        said = next((line for line in reversed(self.engine_lines) if line.strip(" -*")), "")
        quoted = f", saying: {said.strip()}" if said else ""
        return Verdict(shell_code(engine_code) or 1, f"{what}{quoted}{tail}")

    def _failed(self, rank: int, engine_code: int, tail: str, aborted: str | None) -> Verdict:
        one = self.ranks[rank]
        if aborted is not None:
            words = aborted
        elif one.lost and self.report is None:
            words = "is out of reach (its host is down, the network is cut, or its wrapper was killed)"
        else:
            words = self._words(one)
        code = shell_code(one.code) if one.code is not None and not one.ended_by_us else 0
        line = f"rank {rank} on {one.host} {words}{tail}"
        if code == 0 and not one.lost and one.code != 0:
            # It was ended in its turn. The watchdog has ended the others with the code of what was wrong.
            told = [shell_code(r.code) for r in self.ranks.values() if r.code and not r.ended_by_us]
            code = told[0] if told else shell_code(engine_code)
        code = code or OUT_OF_REACH
        return Verdict(code, line, rank, one.host, stopped=self.notified and code == PREEMPTED)

    def _words(self, one: Rank) -> str:
        """Return what is known of a rank's end: the report, and the signal, which ranks cannot see."""
        ended = "was stopped (SIGSTOP), and did not go on" if one.stopped else how(one.code)
        if self.report is None:
            return ended
        if not self.report.died or one.code is None or one.ended_by_us:
            return self.report.words
        return ended + self.report.at

    def _stopped(self, tail: str) -> Verdict:
        assert self.stopped_by is not None
        codes = {rank.code for rank in self.ranks.values()}
        saved = bool(codes) and codes <= {0, PREEMPTED} and len(self.ranks) == self.size
        words = "all ranks saved and ended" if saved and PREEMPTED in codes else "its ranks were ended"
        code = shell_code(-self.stopped_by)
        if saved and self.stopped_by != signal.SIGINT:
            code = PREEMPTED if PREEMPTED in codes else 0
        return Verdict(code, f"{self.stopped_by.name}: {words}{tail}", stopped=True)


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended: the exit code, the last line, and the rank and host that failed first."""

    code: int
    line: str
    rank: int | None = None
    host: str | None = None
    stopped: bool = False


def how(code: int | None) -> str:
    """Say in words how a program ended.

    Example:
        >>> how(3), how(-11)
        ('ended with exit code 3', 'was killed by SIGSEGV (a crash in native code)')
    """
    if code is None:
        return "did not say how it ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    return f"was killed by {number.name}{_HINTS.get(number, '')}"


def shell_code(code: int) -> int:
    """Return an exit code as a shell gives it: 128 and the number of a signal.

    Example:
        >>> shell_code(3), shell_code(-9)
        (3, 137)
    """
    return code if code >= 0 else 128 - code
