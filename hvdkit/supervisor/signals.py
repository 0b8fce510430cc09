"""Record signals that request a run to stop, and handle them between steps.

If a signal handler raised an exception during a collective or a save, ranks would wait for each other. Here, a handler
only records the signal; the ranks stop at the next step at which they agree.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from hvdkit.watchdog.lines import write_line

# EX_TEMPFAIL of sysexits.h, "the user is invited to retry": the run was requested to stop, has saved, and resumes when
# the same command is started again. Distinct from 0 (training finished), 1 (error) and 128 + n (killed by a signal).
Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"  # of a signal
PREEMPTED = 75

# A rank may receive a request twice. A batch system signals both the ranks and mpirun, and Open MPI's mpirun sends the
# ranks SIGTERM a second later (odls_base_sigkill_timeout). Ctrl-C in a terminal reaches launcher and ranks, and the
# launcher forwards it immediately. A signal within this many seconds of the first is an echo.
ECHO_SECONDS = {signal.SIGTERM: 1.5, signal.SIGINT: 0.3}

# Seconds to wait for the main thread to return from native code before a second signal ends the process.
GRACE_SECONDS = 2.0


class StopSignals:
    """Record signals that request a stop while in this context; a second signal ends the process as usual.

    Clusters announce with SIGTERM that a job will be killed, SIGINT is Ctrl-C, and SIGUSR1 is the usual choice for
    Slurm's ``--signal``. A second SIGINT or SIGTERM (after the echo of the first, see ``ECHO_SECONDS``) restores the
    previous handlers and is delivered to them. If the main thread is blocked in native code, e.g. in a collective that
    a dead rank never joins, Python cannot run handlers; a second signal ends the process in this case as well.

    Outside the main thread, Python does not allow signal handlers, and the context does nothing. Ignored signals
    (``nohup``, background jobs of a shell) stay ignored, handlers not installed by Python are kept, and SIGUSR1 is
    only handled if it has the default handler.

    Attributes:
        received: The first signal received, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}
        self._requests = _StopRequests()
        self._thread_requests = _StopRequests()
        self._wakeup_thread: _WakeupThread | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                previous = signal.getsignal(number)
                if _may_handle(number, previous):
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
            self._wakeup_thread = _WakeupThread.start(self._on_signal)
            _ACTIVE.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        if self._requests.is_second(number):
            self._restore()
            os.kill(os.getpid(), number)

    def _on_signal(self, number: int, over: threading.Event) -> None:
        """End the process on a second signal if the main thread does not run its handlers."""
        if self._thread_requests.is_second(number) and not over.wait(GRACE_SECONDS):
            _end(number, f"hvdkit: ended by a second {signal.Signals(number).name}; unsaved progress is lost")

    def _restore(self) -> None:
        """Restore the previous handlers, except those that were changed in the meantime."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous = {}
        if self._wakeup_thread is not None:
            self._wakeup_thread.stop()
            self._wakeup_thread = None
        if self in _ACTIVE:
            _ACTIVE.remove(self)


def _may_handle(number: signal.Signals, previous: Handler) -> bool:
    if previous is None or previous == signal.SIG_IGN:
        return False
    return number != signal.SIGUSR1 or previous == signal.SIG_DFL


class _StopRequests:
    """Distinguishes a second SIGINT or SIGTERM from the first and its echo."""

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


class _WakeupThread:
    """A thread that is called for each signal, with its number, until the event is set that it is over.

    Python's C handler writes the number of each signal to the wakeup descriptor immediately, even if the main thread is
    blocked.
    """

    def __init__(self, reader: int, writer: int, on_signal: Callable[[int, threading.Event], None]) -> None:
        self._reader = reader
        self._writer = writer
        self._on_signal = on_signal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdkit-signals", daemon=True)

    @classmethod
    def start(cls, on_signal: Callable[[int, threading.Event], None]) -> _WakeupThread | None:
        """Start and return the thread, or return None if an event loop (asyncio) already uses the wakeup descriptor."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)
            return None
        thread = cls(reader, writer, on_signal)
        thread._thread.start()
        return thread

    def stop(self) -> None:
        """Stop the thread. Call in the main thread."""
        self._over.set()
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writer):
            signal.set_wakeup_fd(current)
        os.close(self._writer)  # the thread reads EOF and exits

    def _run(self) -> None:
        while data := os.read(self._reader, 1):
            self._on_signal(data[0], self._over)
        os.close(self._reader)


def _end(number: int, line: str) -> None:
    """Write a line, and let a signal end this process. Called in any thread."""
    write_line(line)
    # Python only allows the main thread to set handlers, but its C function works in any thread.
    ctypes.pythonapi.PyOS_setsig(ctypes.c_int(number), ctypes.c_void_p(signal.SIG_DFL))
    os.kill(os.getpid(), number)


class EndNotice:
    """Write a line before SIGTERM ends this process, which otherwise would end without a word.

    After Ctrl-C, Open MPI's mpirun sends its ranks SIGTERM. Does nothing outside the main thread, or if the program or
    an event loop handles signals itself.

    Args:
        line: what to write.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self._thread: _WakeupThread | None = None

    def __enter__(self) -> EndNotice:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._thread = _WakeupThread.start(self._on_signal)
            if self._thread is not None:
                signal.signal(signal.SIGTERM, self._ignore)
                _ACTIVE.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the thread ends the process, also if the main thread is blocked."""

    def _on_signal(self, number: int, over: threading.Event) -> None:
        if number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == self._ignore:
            _end(number, self.line)

    def _restore(self) -> None:
        if self._thread is None:
            return
        if signal.getsignal(signal.SIGTERM) == self._ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._thread.stop()
        self._thread = None
        if self in _ACTIVE:
            _ACTIVE.remove(self)


_ACTIVE: list[StopSignals | EndNotice] = []


def _hold_in_fork() -> None:
    """Hold signals in the thread that forks: until the child has restored its handlers, it would wake the parent."""
    if _ACTIVE:
        _HOLDING.append(signal.pthread_sigmask(signal.SIG_BLOCK, ECHO_SECONDS))


def _resume_after_fork() -> None:
    if _HOLDING:
        signal.pthread_sigmask(signal.SIG_SETMASK, _HOLDING.pop())


def _restore_in_child() -> None:
    """In a forked child: restore the default handling of signals, and don't write to the parent's pipe."""
    for stop in list(_ACTIVE):
        stop._restore()
    _resume_after_fork()


_HOLDING: list[set[int | signal.Signals]] = []  # what the thread that forks blocked before
os.register_at_fork(before=_hold_in_fork, after_in_parent=_resume_after_fork, after_in_child=_restore_in_child)
