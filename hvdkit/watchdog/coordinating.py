"""The sentinel of rank 0 without ``hvdkit run``: also runs the coordinator of the job."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence

from hvdkit.machine import processes
from hvdkit.machine.launcher import end_stuck_launcher, shell_that_waits
from hvdkit.machine.processes import allow_files
from hvdkit.watchdog.admission import Peer
from hvdkit.watchdog.channel import Offer
from hvdkit.watchdog.coordinator import Coordinator
from hvdkit.watchdog.events import Connect, Joined, Message
from hvdkit.watchdog.job_metrics import JobMetrics
from hvdkit.watchdog.lines import write_line
from hvdkit.watchdog.metrics_server import MetricsServer
from hvdkit.watchdog.settings import WatchdogSettings
from hvdkit.watchdog.watching import WatchingSentinel

# Seconds after the end of rank 0 during which others may still connect; seconds after the deadline for ranks to end.
_JOIN_SECONDS = 5.0
_LAST_SECONDS = 13.0
# Seconds after the end of the ranks during which the launcher may detect itself that a rank or a host is lost.
_LAUNCHER_SECONDS = 2.0


class CoordinatingSentinel(WatchingSentinel):
    """Watches rank 0, and coordinates the job, whose sentinels connect to ``listeners``.

    It serves the job's metrics on ``metrics_listener``, if that is not None.
    """

    def __init__(
        self,
        pid: int,
        started: int,
        connected: socket.socket,
        listeners: Sequence[socket.socket],
        metrics_listener: socket.socket | None = None,
    ) -> None:
        super().__init__(pid, started, connected)
        self.coordinator: Coordinator | None = None  # before rank 0 has called Reporter.join
        self._listeners = listeners
        self._metrics_listener = metrics_listener
        process = processes.stat(pid)
        self._launcher = process.parent if process is not None else 0
        self._shell = shell_that_waits(self._launcher)
        self._waits_since: float | None = None  # since when the launcher has been waiting for a lost rank

    def join(self, connect_to: Connect, joined: Joined) -> None:
        """Become the coordinator of the job."""
        settings = WatchdogSettings.from_environment()
        token = Offer.parse(connect_to.offer).token
        allow_files(joined.size)
        metrics = None if self._metrics_listener is None else JobMetrics()
        self.coordinator = Coordinator(
            joined.size, settings, self.selector, self._listeners, token, lines=self._lines, metrics=metrics
        )
        self.coordinator.join(joined, self.obey)
        self.welcome = settings.welcome(joined.size, measures=metrics is not None)
        if self._metrics_listener is not None and metrics is not None:
            MetricsServer(self._metrics_listener, metrics.text).start()

    def report(self, message: Message) -> bool:
        """Report to the coordinator; return False if it has not been created yet."""
        if self.coordinator is None:
            return False
        self.coordinator.handle(self.coordinator.members[0], message, time.monotonic())
        return True

    def run(self) -> int:
        """Watch until the rank has ended, and coordinate until the job has ended."""
        super().run()
        ended_at = time.monotonic()
        give_up_at = None
        while self.coordinator is not None:
            now = time.monotonic()
            if self.coordinator.over and not self._launcher_waits:
                # Sentinels of other ranks may still connect, to report that their ranks have left.
                if self.coordinator.all_ended or now > ended_at + _JOIN_SECONDS:
                    break
            elif self.coordinator.verdict is not None:
                give_up_at = give_up_at or now + self.coordinator.settings.unwind + _LAST_SECONDS
                if now > give_up_at:
                    break
            self.turn()
        self._lines.finish()
        return 0

    def _pause(self, now: float) -> float:
        pause = super()._pause(now)
        return pause if self.coordinator is None else min(pause, self.coordinator.pause(now))

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(key.data, (Peer, socket.socket)):
            assert self.coordinator is not None
            self.coordinator.ready(key, events)
        else:
            super()._ready(key, events)

    def _tick(self, now: float) -> None:
        super()._tick(now)
        self._end_orphan()
        if self.coordinator is None:
            return
        self._end_launcher(now)
        self.coordinator.tick(now)

    def _end_orphan(self) -> None:
        """End the launcher, and with it the job, if the horovodrun that started it was killed."""
        if self._shell is None or not processes.is_over(*self._shell):
            return
        launcher = processes.stat(self._launcher)
        if launcher is not None and launcher.parent != self._shell[0]:
            write_line("hvdkit: horovodrun, or another shell that ran mpirun, was killed: the job ends")
            end_stuck_launcher(self._launcher, ranks_run=True)
        self._shell = None

    @property
    def _launcher_waits(self) -> bool:
        return bool(self._launcher) and self.coordinator is not None and self.coordinator.launcher_waits

    def _end_launcher(self, now: float) -> None:
        """End the launcher if it would wait for a lost rank."""
        assert self.coordinator is not None
        ranks_run = not self.coordinator.has_ended
        if not self._launcher_waits:
            self._waits_since = None
            return
        self._waits_since = self._waits_since or now
        is_due = ranks_run or now > self._waits_since + _LAUNCHER_SECONDS
        if is_due and end_stuck_launcher(self._launcher, ranks_run=ranks_run):
            self._launcher = 0
