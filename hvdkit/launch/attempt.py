"""One start of the job, to its end: its output, signals, failure, and no process left."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from hvdkit.launch.channel import Channel, Event
from hvdkit.launch.engines import CommandLine
from hvdkit.launch.output import Output
from hvdkit.launch.rank import SILENT_SECONDS, adopt_orphans, die_with_parent
from hvdkit.launch.verdict import Course, Verdict

# After a rank failed the others have so long to say their last words, and so long again after SIGTERM.
LAST_WORDS_SECONDS, AFTER_TERM_SECONDS = 1.0, 2.0
# Once all ranks have ended the engine has so long to end, and so long again after SIGTERM. After a failure it has
# nothing to add, and Open MPI's waits for seconds where several hosts fail together, for hours where one is cut off.
ENGINE_SECONDS, FAILED_ENGINE_SECONDS, CUT_OFF_SECONDS = 4.0, 1.0, 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEPT_LINES = 40


class Signals:
    """Collects signals to ``hvdkit run`` in a file that a selector can wait for, while the context lasts."""

    def __enter__(self) -> Signals:
        self.file, self._writer = os.pipe()
        for end in (self.file, self._writer):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda number, frame: None)
            for number in (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD
        }
        return self

    def __exit__(self, *problem: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.file)
        os.close(self._writer)

    def read(self) -> list[signal.Signals]:
        """Return the signals that came."""
        try:
            return [signal.Signals(number) for number in os.read(self.file, 256)]
        except BlockingIOError:
            return []

    def wait(self, seconds: float) -> signal.Signals | None:
        """Wait; return the first signal to stop that comes meanwhile, or None."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.file, selectors.EVENT_READ)
            while True:
                left = until - time.monotonic()
                if selector.select(max(0.0, left)) and (found := [n for n in self.read() if n in STOP_SIGNALS]):
                    return found[0]
                if left <= 0:
                    return None


@dataclass
class Attempt:
    """One run of an engine.

    Attributes:
        engine: its name, for messages.
        line: its command line.
        environment: with which it runs.
        size: number of ranks.
        channel: where the ranks' wrappers connect.
        output: where everybody's lines go.
        signals: that come to ``hvdkit run``.
        grace: seconds to save after a signal.
        places: the host of each rank, by the name that the person gave it; empty: by its own.
    """

    engine: str
    line: CommandLine
    environment: Mapping[str, str]
    size: int
    channel: Channel
    output: Output
    signals: Signals
    grace: float
    places: tuple[str, ...] = ()

    def run(self) -> Verdict:
        """Start the engine, see it to its end and return what became of the job."""
        self.course = Course(self.size, self.engine)
        self._end_at: list[tuple[float, signal.Signals]] = []
        self._engine_end_at: list[tuple[float, signal.Signals]] = []
        self._partial: dict[int, bytes] = {}
        self._held: list[bytes] = []
        self._ending = False
        self._begin = time.monotonic()
        adopt_orphans()
        self._start()
        try:
            while self._process.poll() is None:
                self._turn(0.2)
            self._drain()
        finally:
            self.channel.close()
            end_children()
            for file in (self._process.stdout, self._process.stderr):
                if file is not None:
                    file.close()
        for rank in self.course.ranks:
            self.output.ended(rank)
        verdict = self.course.verdict(self._process.returncode, time.monotonic() - self._begin)
        if verdict.code and verdict.rank is None and not verdict.stopped:
            self.output.write(2, b"".join(self._held))
        return verdict

    @property
    def lost_hosts(self) -> set[str]:
        """Return the hosts whose ranks are out of reach."""
        return {one.host for one in self.course.ranks.values() if one.lost}

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self.line.argv,
                env={**self.environment, **self.line.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C comes to hvdkit run alone
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        except OSError as error:
            self.channel.close()
            raise ValueError(f"--engine {self.engine}: {self.line.argv[0]} cannot start ({error.strerror})") from error
        assert self._process.stdout and self._process.stderr
        for channel, file in ((1, self._process.stdout), (2, self._process.stderr)):
            os.set_blocking(file.fileno(), False)
            self.channel.selector.register(file, selectors.EVENT_READ, channel)
        self.channel.selector.register(self.signals.file, selectors.EVENT_READ, self.signals)

    def _turn(self, seconds: float) -> bool:
        """Wait for something to happen and deal with it; say whether something did."""
        ready = self.channel.selector.select(seconds)
        for key, _ in ready:
            if key.data is self.signals:
                for number in self.signals.read():
                    self._signalled(number)
            elif isinstance(key.data, int):
                self._engine_said(key)
            else:
                for event in self.channel.take(key):
                    self._happened(event)
        self._deadlines()
        return bool(ready)

    def _drain(self) -> None:
        """Read what the ended engine and the wrappers have left behind."""
        until = time.monotonic() + 0.5
        while time.monotonic() < until and self._turn(0.02):
            pass
        for channel, rest in self._partial.items():
            if rest:
                self._write_engine(channel, [rest])

    def _happened(self, event: Event) -> None:
        course = self.course
        if event.kind == "began":
            host = self.places[event.rank] if self.places else event.details["host"]
            course.began(event.rank, host)
        elif event.kind == "output":
            self.output.feed(event.rank, event.channel, event.data)
        elif event.report is not None:
            course.said(event.rank, event.report)
        elif event.kind == "ended":
            course.ended(event.rank, event.details["code"], event.details["signals"], event.details["stopped"])
            self._one_less(event.rank)
        else:
            course.lost(event.rank)
            self._one_less(event.rank)

    def _one_less(self, rank: int) -> None:
        """Decide what follows from the end of one rank."""
        course, now = self.course, time.monotonic()
        if course.failing:
            # Ranks that only follow another leave time to find out which: its host may be cut off.
            delay = LAST_WORDS_SECONDS if course.first is not None else SILENT_SECONDS + 1.0
            delay = self.grace if course.saving else delay
            if not self._ending or (len(self._end_at) == 2 and self._end_at[0][0] > now + delay):
                self._ending = True
                self._end_at = [
                    (now + delay, signal.SIGTERM),
                    (now + delay + AFTER_TERM_SECONDS, signal.SIGKILL),
                ]
        if course.over:
            for other in course.ranks:
                self.channel.order(other)
            cut_off = any(one.lost for one in course.ranks.values())
            failed = FAILED_ENGINE_SECONDS if course.failing else ENGINE_SECONDS
            self._end_engine(CUT_OFF_SECONDS if cut_off else failed)
        elif course.stopped_by is None and not course.failing:
            self.channel.order(rank)  # an engine that sees a failed rank leave would end the others in mid-save

    def _signalled(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number in STOP_SIGNALS and self.course.over:  # all ranks have ended before the signal came
            self._end_engine(0.0)
        elif number in STOP_SIGNALS and self.course.stopped_by is None:
            self.course.stopped_by = number
            passed = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self.output.line(f"hvdkit run: {number.name}: ranks have {self.grace:g} s to end; once more ends them now")
            self._end_at = [(now, passed), (now + self.grace, signal.SIGKILL)]
            if len(self.course.ranks) < self.size:
                self._end_engine(self.grace)
        elif number in STOP_SIGNALS and number == self.course.stopped_by:
            self._end_at = [(now, signal.SIGKILL)]
            self._end_engine(0.0)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self.course.notified = True
            for rank in self.course.ranks:
                self.channel.order(rank, number)

    def _deadlines(self) -> None:
        now = time.monotonic()
        while self._end_at and self._end_at[0][0] <= now:
            _, number = self._end_at.pop(0)
            for rank, one in self.course.ranks.items():
                if not one.over:
                    one.ended_by_us = True
                    self.channel.order(rank, number)
            if number == signal.SIGKILL:
                self._end_engine(ENGINE_SECONDS)
        while self._engine_end_at and self._engine_end_at[0][0] <= now:
            _, number = self._engine_end_at.pop(0)
            self.course.engine_ended_by_us = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _end_engine(self, seconds: float) -> None:
        """End the engine if it has not ended by itself after ``seconds``."""
        until = time.monotonic() + seconds
        if not self._engine_end_at or until < self._engine_end_at[0][0]:
            self._engine_end_at = [(until, signal.SIGTERM), (until + min(2 * seconds, ENGINE_SECONDS), signal.SIGKILL)]

    def _engine_said(self, key: Any) -> None:
        try:
            data = os.read(key.fd, 1 << 16)
        except OSError:
            return
        if not data:
            self.channel.selector.unregister(key.fileobj)
            return
        *lines, rest = (self._partial.get(key.data, b"") + data).split(b"\n")
        self._partial[key.data] = rest
        if lines:
            self._write_engine(key.data, lines)
        kept = [line.decode(errors="replace") for line in lines]
        self.course.engine_lines = [*self.course.engine_lines, *kept][-_KEPT_LINES:]

    def _write_engine(self, channel: int, lines: list[bytes]) -> None:
        """Write the engine's lines; what it says after a rank's failure only where that rank is not known in the end.

        Engines fill a screen to say that a process has ended, and would push up the lines that say why.
        """
        data = b"".join(b"[%b] %b\n" % (self.engine.encode(), line) for line in lines)
        if self._ending or self.course.stopped_by is not None:
            self._held.append(data)
        else:
            self.output.write(channel, data)


def end_children() -> None:
    """Kill every process below this one; those whose parents have ended are here, too."""
    until = time.monotonic() + 3.0
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=0.2)
