"""One start of the job, to its end: output, signals, failures, and cleanup of all processes."""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdkit.commands.run.engine_process import EngineProcess
from hvdkit.commands.run.engines import engine_environment
from hvdkit.commands.run.hosts import Host, slots_of
from hvdkit.commands.run.job import Job
from hvdkit.commands.run.output import OutputWriter
from hvdkit.commands.run.preflight import Network
from hvdkit.commands.run.secret import PrivateFile
from hvdkit.errors import ClusterError
from hvdkit.machine import processes
from hvdkit.machine.launcher import ALONE, launched_rank
from hvdkit.watchdog import sentinel
from hvdkit.watchdog.admission import listen
from hvdkit.watchdog.channel import Offer, Output
from hvdkit.watchdog.coordinator import Coordinator
from hvdkit.watchdog.events import HoldOutput
from hvdkit.watchdog.settings import RUN_VARIABLE, WatchdogSettings
from hvdkit.watchdog.verdict import AS_EVERY_RANK, PREEMPTED, Verdict, shell_code

# Seconds for the engine to end once all ranks have ended: after success; after a failure (or a signal before all ranks
# had started); if a host is cut off. After a failure the engine has nothing to add, but Open MPI's waits for seconds if
# several hosts fail together, and for hours if one is cut off.
ENGINE_SECONDS = 4.0
FAILED_ENGINE_SECONDS = 1.0
CUT_OFF_SECONDS = 0.5
# Seconds to read the remaining output of the ended engine and the sentinels.
_DRAIN_SECONDS = 0.5
# Seconds to end the remaining descendants of this process.
_CHILDREN_SECONDS = 3.0
# Unread bytes of output above which ranks that write more are blocked; the same once the job is being ended, when ranks
# write their last lines. Seconds between checks whether the reader has resumed.
_MAX_UNREAD = 1 << 22
_MAX_UNREAD_AT_END = 1 << 26
_PAUSED_SECONDS = 0.02
# Seconds between lines about a start that takes long, without a terminal.
_START_SECONDS = 60.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SENTINEL = (sys.executable, "-IS", sentinel.PATH, "run")


class Signals:
    """A context that collects signals to ``hvdkit run`` in a file that a selector can wait for.

    Attributes:
        stopped: True once a stop signal has been read.
    """

    def __enter__(self) -> Signals:
        self.stopped = False
        self.file, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
        """Return the signals that have arrived."""
        try:
            numbers = [signal.Signals(number) for number in os.read(self.file, 256)]
        except BlockingIOError:
            return []
        self.stopped = self.stopped or any(number in STOP_SIGNALS for number in numbers)
        return numbers

    def wait(self, seconds: float) -> signal.Signals | None:
        """Wait for ``seconds``, or until a stop signal arrives; return that signal, or None."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            select.select([self.file], [], [], max(0.0, left))
            if stops := [number for number in self.read() if number in STOP_SIGNALS]:
                return stops[0]
            if left <= 0:
                return None


@dataclass
class Attempt:
    """One start of a job, to its end, on ``hosts``, with the number of ranks on each as slots."""

    job: Job
    hosts: tuple[Host, ...]
    network: Network
    program: Sequence[str]
    output: OutputWriter
    signals: Signals

    def __post_init__(self) -> None:
        self._size = slots_of(self.hosts)
        self._grace = self.job.config.grace
        self._selector = selectors.DefaultSelector()
        self._stopped_by: signal.Signals | None = None
        self._kill_at: float | None = None
        self._began_at = time.monotonic()
        self._report_start_at = _START_SECONDS  # seconds since then
        self._paused_ranks: set[int] = set()  # ranks that must not send output now

    def run(self) -> Verdict:
        """Start the engine, wait for its end, and return how the job ended.

        Raises:
            ValueError: the engine cannot be started.
            ClusterError: this host cannot listen, or another host cannot write the file with the job's token.
        """
        # For each rank a connection, a log, and a transfer of a function or its outcome.
        processes.allow_files(3 * self._size)
        offer = self._open_coordinator()
        file = None
        processes.adopt_orphans()
        try:
            if self.job.engine.name == "gloo":  # horovodrun would put the offer on a command line
                others = [host.name for host in self.hosts if not host.is_local]
                file = PrivateFile(str(offer), self.job.remote(), others, self.job.config.check_timeout)
            self._engine = self._start(str(file.path if file else offer))
            self._selector.register(self.signals.file, selectors.EVENT_READ, self.signals)
            while self._engine.code is None:
                self._turn(0.2)
            self._drain()
        finally:
            self._coordinator.close()
            if self.job.function is not None:
                self.job.function.close()
            self._selector.close()
            processes.end_descendants(_CHILDREN_SECONDS)
            if file is not None:
                members = self._coordinator.members.values()
                file.remove({member.joined.host for member in members if member.lost_at is not None})
        self._engine.remove_files()
        for rank in self._coordinator.members:
            self.output.ended(rank)
        verdict = self._judge()
        if verdict.code and self.job.metrics is not None:
            self.job.metrics.fail(verdict)
        if verdict.code and verdict.rank is None and not verdict.final:
            self._engine.write_held()
        return verdict

    def _open_coordinator(self) -> Offer:
        """Listen for the ranks' sentinels; return the offer with which they connect."""
        addresses = self.network.addresses
        try:
            listeners = listen(addresses)
            if self.job.function is not None:
                self.job.function.open(addresses, self._size)
        except OSError as error:
            at = ", ".join(addresses)
            raise ClusterError(f"hvdkit run cannot listen at {at} ({error}); pass another --interface") from error
        offer = Offer(addresses, listeners[0].getsockname()[1], os.urandom(16).hex())
        settings = WatchdogSettings.from_environment(self._grace)
        # Ranks fill one host after another, except that Slurm and Ray may place them differently.
        filled = () if self.job.engine.name in ("srun", "ray") else self.hosts
        names = [host.name for host in filled for _ in range(host.slots)]
        metrics = self.job.metrics
        answer = settings.welcome(self._size, measures=metrics is not None)
        self._coordinator = Coordinator(
            self._size,
            settings,
            self._selector,
            listeners,
            offer.token,
            welcome=lambda joined: replace(answer, program=self.job.program(self.program, joined.rank)),
            output=self._write_output,
            lines=self.output,
            hosts=dict(enumerate(names)),
            under_run=True,
            metrics=metrics,
        )
        return offer

    def _start(self, offer: str) -> EngineProcess:
        """Start the engine. Sentinels get the program over their connection, as engines interpret some arguments."""
        job = self.job
        line = job.command_line(self.hosts, SENTINEL, self.network.interface, RUN_VARIABLE)
        environment = {**engine_environment(job.environment, job.names), RUN_VARIABLE: offer}
        if job.sends_variables:
            for name in job.config.env:
                environment.pop(name, None)
        return EngineProcess(job.engine.name, line, environment, self._selector, self.output)

    def _write_output(self, rank: int, output: Output) -> None:
        """Write the output of a rank; put the rank on hold if the reader of this process pauses or is too slow."""
        is_starting = self._coordinator.members[rank].pid is None
        self.output.feed(rank, output.channel, output.data, is_starting=is_starting)
        if rank not in self._paused_ranks and self.output.waiting > self._max_unread:
            self._paused_ranks.add(rank)
            self._coordinator.members[rank].send(HoldOutput(hold=True))

    @property
    def _max_unread(self) -> int:
        return _MAX_UNREAD_AT_END if self._is_over else _MAX_UNREAD

    def _turn(self, seconds: float) -> bool:
        """Wait for events and handle them; return True if there were any."""
        if self._paused_ranks:
            seconds = min(seconds, _PAUSED_SECONDS)
            if self.output.waiting <= self._max_unread // 2:
                for rank in self._paused_ranks:
                    self._coordinator.members[rank].send(HoldOutput(hold=False))
                self._paused_ranks.clear()
        ready = self._selector.select(min(seconds, self._coordinator.pause(time.monotonic())))
        for key, events in ready:
            if key.data is self.signals:
                for number in self.signals.read():
                    self._handle_signal(number)
            elif isinstance(key.data, int):
                self._engine.read(key, self._holds_engine)
            else:
                self._coordinator.ready(key, events)
        now = time.monotonic()
        self._coordinator.tick(now)
        if self._have_ended and not self._engine.is_ending:
            self._release()
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            self._coordinator.signal(signal.SIGKILL)
            self._engine.end(ENGINE_SECONDS)
        self._engine.tick(time.monotonic())
        self.output.tick(time.monotonic())
        self._show_start()
        return bool(ready)

    def _show_start(self) -> None:
        members = self._coordinator.members.values()
        initialized = sum(member.pid is not None for member in members)
        if self._is_over or initialized == self._size:
            self.output.show_start()
            return
        elapsed = time.monotonic() - self._began_at
        forms = start_lines(elapsed, size=self._size, started=len(members), initialized=initialized)
        if self.output.has_terminal:
            self.output.show_start(*forms)
        elif elapsed >= self._report_start_at and not self.output.has_output:
            self._report_start_at += _START_SECONDS
            self.output.line(forms[0])

    @property
    def _have_ended(self) -> bool:
        """True once all ranks have ended. After a failure or a signal, ranks that have not started do not count."""
        coordinator = self._coordinator
        if self._stopped_by is not None:
            return not any(member.is_running for member in coordinator.members.values())
        return coordinator.all_ended or (coordinator.verdict is not None and coordinator.over)

    @property
    def _is_over(self) -> bool:
        """True once the job has failed or was stopped."""
        return self._coordinator.verdict is not None or self._stopped_by is not None

    @property
    def _holds_engine(self) -> bool:
        """True once the job is over or a rank has failed: the engine's lines are then held back.

        They are written only if the failed rank remains unknown: engines print many lines when a process ends, which
        would hide those with the reason.
        """
        exited = (member.exited for member in self._coordinator.members.values())
        return self._is_over or any(end is not None and end.code for end in exited)

    def _drain(self) -> None:
        """Read the remaining output of the ended engine and the sentinels."""
        until = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < until and self._turn(0.02):
            pass
        self._engine.flush(self._holds_engine)

    def _release(self) -> None:
        """Let the sentinels and the engine end, after all ranks have ended."""
        self._coordinator.release()
        if any(member.lost_at is not None for member in self._coordinator.members.values()):
            self._engine.end(CUT_OFF_SECONDS)
        else:
            ends_itself = self._coordinator.verdict is None and self._coordinator.all_ended
            self._engine.end(ENGINE_SECONDS if ends_itself else FAILED_ENGINE_SECONDS)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self._coordinator.notified = True
            self._coordinator.signal(number)
        elif number not in STOP_SIGNALS:
            return
        elif self._stopped_by is None and self._have_ended:  # ended before the signal
            self._engine.end(0.0)
        elif self._stopped_by is None:
            self._stopped_by = number
            self._coordinator.stop_requested = True
            again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
            self.output.line(f"hvdkit run: {number.name}: ranks have {self._grace:g} s to end; {again} to end them now")
            for rank, member in self._coordinator.members.items():
                if number == signal.SIGINT and member.pid is None:
                    self.output.interrupt(rank)
            self._coordinator.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace
        elif number == self._stopped_by:
            self._kill_at = time.monotonic()
            self._engine.end(0.0)

    def _judge(self) -> Verdict:
        """Return how the attempt ended. Called after the engine has ended."""
        engine = self._engine
        name = self.job.engine.name
        members = self._coordinator.members
        assert engine.code is not None
        tail = f"; the job ended after {time.monotonic() - self._began_at:.1f} s"
        if self._stopped_by is not None:
            return self._stopped(self._stopped_by, tail)
        verdict = self._coordinator.judge()
        if verdict.code == 0 and not verdict.summary:
            unusual = engine.code != 0 and not engine.was_ended
            summary = f"{name} ended with exit code {engine.code} after all ranks had ended with 0{tail}"
            return Verdict(0, summary if unusual else "")
        if verdict.rank is not None:
            is_preempted = self._coordinator.notified and verdict.code == PREEMPTED
            # Python's exit code for an exception; before hk.init(), nothing reports which.
            summary = verdict.summary
            if name == "ray" and members[verdict.rank].lost_at is not None and engine.last_report:
                step = "" if verdict.step is None else f" at step {verdict.step}"
                summary = f"failed{step}: {engine.last_report}"
            is_unreported = verdict.code == 1 and members[verdict.rank].pid is None
            if is_unreported and (error := self.output.last_error(verdict.rank)):
                is_alike = self._size > 1 and all(self.output.last_error(rank) == error for rank in range(self._size))
                tail = f"{AS_EVERY_RANK if is_alike else ''}: {error}{tail}"
            return replace(verdict, summary=summary + tail, final=is_preempted, flight=self._coordinator.flight)
        summary = verdict.summary
        if not members:
            summary = f"{name} ended with exit code {engine.code} before any rank started"
            if (outer := launched_rank()) is not ALONE:
                summary += f" (hvdkit run was started in rank {outer.rank} of a job of {outer.launcher})"
        elif missing := sorted(set(range(self._size)) - members.keys()):
            noun = "rank" if len(missing) == 1 else "ranks"
            summary = f"{noun} {', '.join(map(str, missing))} of {self._size} never started"
            if (decided := self._coordinator.verdict) is not None:  # other ranks may have been ended since then
                verdict = replace(verdict, code=decided.code)
                codes = {rank: member.exited.code for rank, member in members.items() if member.exited is not None}
                ended = [rank for rank, code in codes.items() if code and shell_code(code) == decided.code]
                summary += f"; rank {ended[0]} ended with exit code {decided.code}" if ended else ""
        quoted = f"; {name}: {engine.last_line}" if engine.last_line else ""
        return replace(
            verdict,
            code=(0 if engine.was_ended else shell_code(engine.code)) or verdict.code or 1,
            summary=f"{summary}{quoted}{tail}",
            flight=self._coordinator.flight,
        )

    def _stopped(self, number: signal.Signals, tail: str) -> Verdict:
        exited = [member.exited for member in self._coordinator.members.values()]
        codes = {None if one is None else one.code for one in exited}
        saved = bool(codes) and codes <= {0, PREEMPTED} and len(exited) == self._size
        summary = "all ranks saved and ended" if saved and PREEMPTED in codes else "its ranks were ended"
        code = shell_code(-number)
        if saved and number != signal.SIGINT:
            code = PREEMPTED if PREEMPTED in codes else 0
        # After a save at the signal, the chief has already written where the run continues.
        return Verdict(
            code, f"{number.name}: {summary}{tail}", final=True, saved="" if saved else self._coordinator.saved
        )


def start_lines(seconds: float, *, size: int, started: int, initialized: int) -> tuple[str, ...]:
    """Return the progress of a start in lines for terminals of any width, the longest one first.

    Example:
        >>> start_lines(12.4, size=4, started=4, initialized=1)[1:]
        ('12 s: 4/4 started, 1 initialized', '12 s')
    """
    elapsed = f"{seconds:.0f} s"
    ranks = f"{started} of {size} ranks started, {initialized} passed hk.init()"
    return f"hvdkit run: {elapsed}: {ranks}", f"{elapsed}: {started}/{size} started, {initialized} initialized", elapsed
