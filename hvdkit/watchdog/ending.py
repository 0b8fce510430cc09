"""Ends a rank after a failure: its interpreter exits normally, with the verdict's code, within a deadline.

A background thread receives the verdict. It releases the main thread from collectives by shutting Horovod down, and
interrupts it with a signal whose handler raises ``SystemExit``: ``with`` blocks, ``finally`` clauses and ``atexit``
handlers run, and files are flushed. A rank that has not unwound by the deadline calls ``os._exit``, from native code if
Python threads cannot run, which preserves its exit code. If that fails as well, its sentinel kills it shortly after.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from types import FrameType

from hvdkit.watchdog.lines import flush_streams

# Maximum seconds for Horovod to release a rank, and for TensorFlow to raise the error. The signal is sent afterwards:
# an exception raised earlier would be lost in TensorFlow's own conversion of errors.
_RELEASE_SECONDS = 1.0
_RAISE_SECONDS = 0.2
_FLUSH_SECONDS = 1.0
# Seconds until the native timer ends this process: after the deadline; after it has unwound, while other ranks unwind
# or exit; and after the interpreter has started to shut down.
_SPARE_SECONDS = 1.0
_OTHERS_SECONDS = 13.0
_SHUTDOWN_SECONDS = 4.0
_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2
# Ignored by default, and used by few programs.
_SIGNAL = signal.SIGURG
_VICTIM_TEXTS = (
    "has been shut down",
    "has not been initialized",
    "left the job",
    "HorovodInternalError",
    "Connection reset",
    "Connection closed",
    "MPI_ERR",
    "Broken pipe",
    "gloo/transport",
    "Process set provided does not exist",
)
_ENGINES = ("Horovod", "hvdkit", "gloo", "MPI_", "Process set")


class Exit(SystemExit):
    """Ends the interpreter after another rank has failed."""


class Ending:
    """Ends this process after another rank has failed.

    Attributes:
        code: the verdict's exit code, or None if no other rank has failed.
        line: which rank failed, and why; "" if unknown.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self.line = ""
        self._release: Callable[[], None] | None = None
        self._pid = 0
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._timer = _NativeTimer()
        self._releasing: threading.Thread | None = None

    def prepare(self, release: Callable[[], None]) -> None:
        """Allow :meth:`begin` to interrupt the main thread. Called by the main thread when a world begins.

        In a new thread, ``release`` is called to release the main thread from collectives.
        """
        self._release = release
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(_SIGNAL, self._interrupted)

    def forget(self) -> None:
        """Undo :meth:`prepare`."""
        self._release = None
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(_SIGNAL) == self._interrupted:
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)

    @property
    def begun(self) -> bool:
        """Return True once the verdict has arrived and this process is about to end."""
        return self.code is not None

    def begin(self, code: int, seconds: float) -> None:
        """Make the main thread exit with ``code`` within ``seconds``. Called by another thread; returns immediately."""
        if self.begun:
            return
        self.code = code
        self._timer.arm(code, seconds + _SPARE_SECONDS)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and cannot start threads
            if self._release is not None:
                self._releasing = threading.Thread(target=self._release, name="hvdkit-watchdog-release", daemon=True)
                self._releasing.start()
            threading.Thread(target=self._interrupt, name="hvdkit-watchdog-interrupt", daemon=True).start()

    def _interrupt(self) -> None:
        """Run the signal's handler in the main thread, once Horovod has had time to release it."""
        if self._releasing is not None:
            self._releasing.join(_RELEASE_SECONDS)
        time.sleep(_RAISE_SECONDS)
        if signal.getsignal(_SIGNAL) == self._interrupted:
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, _SIGNAL)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        error = sys.exc_info()[1]
        is_unwinding = error is not None and is_victim(error)
        if self.begun and os.getpid() == self._pid and _runs_the_script(frame) and not is_unwinding:
            self.leave()

    def leave(self) -> None:
        """Raise the exception that ends the interpreter with the verdict's code. Called by the main thread."""
        # A launcher sends SIGTERM when another rank ends, but this rank already has a deadline.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Exit(self.code)

    def has_caused(self, error: BaseException | None) -> bool:
        """Return True if ``error`` is, or is chained to, the exception that :meth:`leave` raised."""
        while error is not None and not isinstance(error, Exit):
            error = error.__cause__ or error.__context__
        return error is not None

    def is_released(self) -> bool:
        """Wait a limited time for Horovod to shut down; return False if it is still shutting down."""
        if self._releasing is not None:
            self._releasing.join(_FLUSH_SECONDS)
        return self._releasing is None or not self._releasing.is_alive()

    def has_unwound(self) -> None:
        """Extend the timer: this rank has met the deadline, and waits for the other ranks."""
        assert self.code is not None
        self._timer.arm(self.code, _OTHERS_SECONDS)

    def finish(self) -> None:
        """Let the interpreter shut down, within a limited time. Called by the last ``atexit`` handler."""
        assert self.code is not None
        self._timer.arm(self.code, _SHUTDOWN_SECONDS)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self.is_released():  # Horovod must not be shut down a second time concurrently
            end_process(self.code)


def is_victim(error: BaseException) -> bool:
    """Return True if ``error`` is a consequence of another rank's failure, e.g. of the release from a collective."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "HorovodInternalError" in names:
        return True
    if "ClusterError" in names and error.__cause__ is not None and is_victim(error.__cause__):
        return True
    text = str(error)
    if "OpError" in names and not any(engine in text for engine in _ENGINES):  # e.g. tf.data reading over a network
        return False
    return bool(names & {"OpError", "ClusterError"}) and any(part in text for part in _VICTIM_TEXTS)


def is_interrupt(error: BaseException) -> bool:
    """Return True if ``error`` is a KeyboardInterrupt, or the one that pybind11 raises instead.

    Ctrl-C may arrive while TensorFlow creates the exception of a graph that was ended. pybind11 then raises a
    RuntimeError, whose text contains both.
    """
    return isinstance(error, KeyboardInterrupt) or "REPLACED BY KeyboardInterrupt" in str(error)


def _runs_the_script(frame: FrameType | None) -> bool:
    """Return False in hooks and handlers that run at interpreter exit: an exception raised there would be lost."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and (frame.f_code.co_name == "<module>" or frame.f_globals.get("__name__") == "runpy")


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of Linux: sigevent(7)."""

    _fields_ = (
        ("value", ctypes.c_long),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    )


class _NativeTimer:
    """Calls C's ``_exit`` after a delay, because Python threads do not run while the interpreter shuts down."""

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None

    def arm(self, code: int, seconds: float) -> None:
        """End this process with ``code`` in ``seconds``. Replaces an earlier setting."""
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            if self._timer is None:
                event = _SignalEvent(code, 0, _SIGEV_THREAD, ctypes.cast(libc._exit, ctypes.c_void_p).value)
                timer = ctypes.c_void_p()
                if libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
                    return
                self._timer = timer
            whole, part = divmod(seconds, 1)
            libc.timer_settime(self._timer, 0, (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9)), None)


class EngineEnd:
    """Shuts Horovod down once, in the first thread that calls it: two concurrent shutdowns abort inside Horovod."""

    def __init__(self, shutdown: Callable[[], None]) -> None:
        self._shutdown = shutdown
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if self._lock.acquire(blocking=False):
            atexit.unregister(self._shutdown)  # Horovod's own handler would shut it down again
            self._shutdown()


def end_process(code: int) -> None:
    """End this process with ``code`` even if its main thread is blocked. Flush files first, for a limited time."""
    gc.unfreeze()  # to find files opened before hvdkit imported TensorFlow: see tensorflow_loading.py
    # Another thread may hold a file's lock while it is blocked on a full pipe.
    flusher = threading.Thread(target=flush_files, daemon=True)
    with contextlib.suppress(RuntimeError):  # Python 3.12+ cannot start threads in atexit handlers
        flusher.start()
        flusher.join(_FLUSH_SECONDS)
    os._exit(code)


def flush_files() -> None:
    """Flush the standard streams, then every file that is open for writing."""
    flush_streams()
    for file in gc.get_objects():
        if issubclass(type(file), _BUFFERED):
            with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
                file.flush()


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@cache
def ending() -> Ending:
    """Return the :class:`Ending` of this process."""
    return Ending()


def report_exit_status() -> int:
    """Return the read end of a pipe to which the C library writes this process's exit status when it exits.

    ``on_exit`` calls a function with the status, here ``fputc`` of one byte. No other method works without being the
    parent or replacing ``sys.exit``. Nothing is written if the process is killed or calls ``os._exit``.
    Source: on_exit(3).
    """

    def write_nothing() -> None:
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), writer)

    reader, writer = os.pipe()
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fdopen(writer, b"w"))
    libc.setvbuf(file, None, 2, 0)  # _IONBF
    libc.on_exit(libc.fputc, file)
    # A forked child inherits the handler, but its status is not this rank's.
    os.register_at_fork(after_in_child=write_nothing)
    return reader
