"""Ends a failed job: its ranks send their last collectives and unwind, and the last line is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from hvdkit.watchdog import flight_file
from hvdkit.watchdog.events import End, GiveFlight, Release
from hvdkit.watchdog.flight_recorder import SLOTS
from hvdkit.watchdog.lines import Lines
from hvdkit.watchdog.member import Member, broadcast
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.verdict import Verdict

# Maximum number of tracebacks to print: those of a thousand ranks would hide the last line.
TEXTS = 16
# Seconds between the last line and the end of the ranks: horovodrun stops forwarding output when the first rank ends.
_FORWARD_SECONDS = 0.2
# Seconds after the deadline for a rank that has left to shut MPI down and exit: only then is its exit code known. The
# other ranks wait for that long: see ``ending.py`` and ``base.py``.
_SPARE_SECONDS = 9.0
# Seconds for all ranks to send their last collectives; minimum number per rank; maximum number of all ranks.
_FLIGHT_SECONDS = 2.0
_FEWEST_RECORDS = 10
_ALL_RECORDS = 50_000
# Seconds to write the flight recorder's file; seconds for the reader to take the last lines.
_FILE_SECONDS = 1.0
_WRITE_SECONDS = 1.0


class JobEnd:
    """Ends a job, step by step. ``judge`` returns the verdict on the events so far.

    Attributes:
        due: when the next step is due; None before the first step and after the last one.
        flight: the line about the flight recorder's file, or "".
        has_written: the last line has been written, and the launcher has had time to forward it.
    """

    def __init__(
        self,
        size: int,
        settings: WatchdogSettings,
        members: Mapping[int, Member],
        judge: Callable[[], Verdict],
        lines: Lines,
        *,
        writes_last: bool,
    ) -> None:
        self._size = size
        self._settings = settings
        self._members = members
        self._judge = judge
        self._lines = lines
        self._writes_last = writes_last
        self._steps: Iterator[float] = iter(())
        self.due: float | None = None
        self.flight = ""
        self.has_written = False

    def begin(self, verdict: Verdict) -> None:
        """Begin to end the job with this verdict."""
        self._steps = self._end(verdict)
        self.due = 0.0
        self.tick(0.0)

    def tick(self, now: float) -> None:
        """Run the next step if it is due."""
        if self.due is not None and self.due <= now:
            pause = next(self._steps, None)
            self.due = None if pause is None else time.monotonic() + pause

    def launcher_waits(self, verdict: Verdict) -> bool:
        """Return True if the last line is written, and a rank on another host that does not exit keeps the launcher.

        A launcher detects that a host has died, but not that a host is cut off or that a rank is stopped.
        """
        if verdict.orderly or not self.has_written:
            return False
        is_over = self.due is None
        remote = (one for one in self._members.values() if not one.is_here and one.exited is None)
        return any(one.is_silent or (is_over and one.lost_at is None and one.rank == verdict.rank) for one in remote)

    def _end(self, verdict: Verdict) -> Iterator[float]:
        """Run the steps; yield the seconds until the next one."""
        senders = self._request_flights()
        tracebacks = list(verdict.texts[-TEXTS:])
        if len(verdict.texts) > TEXTS:
            more = len(verdict.texts) - TEXTS
            tracebacks.insert(0, f"hvdkit: {more} more tracebacks are left out")
        for text in tracebacks:
            self._lines.line(text)
        unwind = self._settings.unwind if verdict.orderly else 0.0
        until = time.monotonic() + (unwind or _FLIGHT_SECONDS)
        culprit = self._culprit(verdict)
        if unwind:
            finalize = culprit is not None and culprit.script_ended_at is not None
            order = End(code=verdict.code, unwind=unwind, line=verdict.line, finalize=finalize)
            broadcast(self._members, order)
            yield from self._await_unwinding(verdict, until)
        else:
            while time.monotonic() < until and any(member.flight is None for member in senders):
                yield 0.01
        self._write_last_lines()
        code = self._judge().code
        if culprit is None or culprit.is_running:
            yield _FORWARD_SECONDS
        self.has_written = True
        yield 0.0  # rank 0's sentinel ends a launcher that would wait for a lost host
        broadcast(self._members, Release(code=code) if unwind else End(code=code))

    def _request_flights(self) -> list[Member]:
        """Request the last collectives of all ranks; return the ranks that can answer."""
        senders = [member for member in self._members.values() if member.is_training and member.is_connected]
        most = max(_FEWEST_RECORDS, min(SLOTS, _ALL_RECORDS // max(1, len(senders))))
        for member in senders:
            member.send(GiveFlight(most=most))
        return senders

    def _culprit(self, verdict: Verdict) -> Member | None:
        """Return the failed rank; a sentinel that replaced its first one is a new Member."""
        return None if verdict.rank is None else self._members[verdict.rank]

    def _await_unwinding(self, verdict: Verdict, until: float) -> Iterator[float]:
        """Wait until all ranks have unwound or time is up; then, if the failed rank's script had ended, release it."""
        while time.monotonic() < until and not self._have_unwound():
            yield 0.05
        culprit = self._culprit(verdict)
        if culprit is None or culprit.script_ended_at is None or not culprit.is_running:
            return
        if culprit.released is None:
            culprit.released = Release()
            culprit.send(culprit.released)
        while culprit.is_running and time.monotonic() < until + _SPARE_SECONDS:
            yield 0.05

    def _have_unwound(self) -> bool:
        """Return True once all ranks have unwound, or one has exited without unwinding."""
        unwinding = [one for one in self._members.values() if one.script_ended_at is None and not one.unwound]
        early = any(one.exited is not None and one.exited.code != 0 for one in unwinding)
        return early or not any(one.is_training and one.is_running for one in unwinding)

    def _write_last_lines(self) -> None:
        """Write the last line of the job, from the events so far, and the path of the flight recorder's file."""
        verdict = self._judge()
        ranks = [
            flight_file.RankFlight(
                rank=member.rank, host=member.joined.host, clock=member.clock_offset, records=member.flight.records
            )
            for member in self._members.values()
            if member.flight is not None
        ]
        if self._writes_last:
            self._lines.line(f"hvdkit: {verdict.last_line}")

        def write() -> None:
            if verdict.common:
                return
            self.flight = flight_file.write(verdict.line, ranks, self._size)

        # In a thread: a file system that hangs may be the reason for the failure.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(_FILE_SECONDS)
        if not self._writes_last:
            return
        if self.flight:
            self._lines.line(self.flight)
        self._lines.finish(_WRITE_SECONDS)  # end the job even if the reader has paused
