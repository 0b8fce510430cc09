"""Signals that ask a run to stop are noted, and acted upon between two steps.

An exception that a handler raises in the middle of a collective, or of a save, leaves ranks that wait for each
other. Here a handler only notes the signal; the ranks agree to stop at the next step that they agree at.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from hvdkit.watchdog.output import write_line

# EX_TEMPFAIL of sysexits.h, "the user is invited to retry": the run was told to stop, has saved, and goes on when the
# same command starts again. Distinct from 0 (trained to the end), 1 (an error) and 128 + n (ended by a signal).
PREEMPTED = 75

# A rank may get one request twice. A batch system signals the ranks and the mpirun above them, and Open MPI's mpirun
# sends them SIGTERM a second later (odls_base_sigkill_timeout); a terminal's Ctrl-C reaches launcher and ranks, and
# comes again from the launcher at once. A signal within so many seconds of the first is its echo.
ECHO_SECONDS = {signal.SIGTERM: 1.5, signal.SIGINT: 0.3}

# So long the main thread may take to come back from native code before a second signal ends the process without it.
GRACE_SECONDS = 2.0


class StopSignals:
    """Note signals that ask to stop, while the context lasts; a second one ends the process as ever.

    SIGTERM is how clusters announce that a job will be killed, SIGINT is Ctrl-C, and SIGUSR1 is the usual choice of
    Slurm's ``--signal``. A second SIGINT or SIGTERM (later than an echo of the first, see ``ECHO_SECONDS``) puts back
    the handlers from before and is delivered to them. Where the main thread waits in native code, as in a
    collective that a dead rank never joins, Python runs no handlers; a second signal ends the process there, too.

    In any other thread than the main one Python allows no handlers: the context does nothing. A signal that is
    ignored (``nohup``, a shell's background job) stays ignored, one whose handler is not Python's stays with it, and
    SIGUSR1 is taken only where nobody else handles it.

    Args:
        signals: the signals to note.

    Attributes:
        received: The first signal that came, or None.

    Example::

        with StopSignals() as stop:
            for batch in batches:
                train_step(batch)
                if stop.received is not None:
                    save()
                    sys.exit(PREEMPTED)
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)) -> None:
        self.received: signal.Signals | None = None
        self._signals = tuple(signals)
        self._previous: dict[signal.Signals, Any] = {}
        self._requests = _Requests()
        self._watch: _Watch | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                previous = signal.getsignal(number)
                if _may_take(number, previous):
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
            self._watch = _Watch.start()
            _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        if self._requests.is_second(number):
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        """Put back the handlers from before, except where somebody has changed them since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous = {}
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self in _ACTIVE:
            _ACTIVE.remove(self)


def _may_take(number: signal.Signals, previous: Any) -> bool:
    if previous is None or previous == signal.SIG_IGN:
        return False
    return number != signal.SIGUSR1 or previous == signal.SIG_DFL


class _Requests:
    """Tells a second SIGINT or SIGTERM from the first, and from the first one's echo."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_second(self, number: int) -> bool:
        echo = ECHO_SECONDS.get(signal.Signals(number))
        if echo is None:
            return False
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= echo


class _Watch:
    """A thread that ends the process on a second signal where the main thread does not come to its handlers.

    Python's own C handler writes the number of each signal to the wakeup descriptor at once, whatever the main
    thread waits in.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdkit-signals", daemon=True)

    @classmethod
    def start(cls) -> _Watch | None:
        """Return a running watch, or None where an event loop (asyncio's) has the wakeup descriptor already."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)
            return None
        watch = cls(reader, writer)
        watch._thread.start()
        return watch

    def stop(self) -> None:
        """End the watch. Called in the main thread."""
        self._over.set()
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writer):
            signal.set_wakeup_fd(current)
        os.close(self._writer)  # the thread reads the end of the pipe and is done

    def _run(self) -> None:
        requests = _Requests()
        while data := os.read(self._reader, 1):
            if requests.is_second(data[0]) and not self._over.wait(GRACE_SECONDS):
                write_line(f"hvdkit: ended by a second {signal.Signals(data[0]).name}; what was not saved is lost")
                # Python lets only the main thread set handlers; its C function serves any thread.
                ctypes.pythonapi.PyOS_setsig(ctypes.c_int(data[0]), ctypes.c_void_p(signal.SIG_DFL))
                os.kill(os.getpid(), data[0])
        os.close(self._reader)


_ACTIVE: list[StopSignals] = []


def _leave_to_parent() -> None:
    """In a forked child: it ends by signals as ever, and does not write into the pipe of its parent."""
    for stop in list(_ACTIVE):
        stop._restore()


os.register_at_fork(after_in_child=_leave_to_parent)
