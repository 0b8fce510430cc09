"""One rank that fails ends the whole job, and one last line says who failed, at which step, and why.

Hooks note what ends this rank: an exception in any thread, ``sys.exit(n)``. The watchdog's channel then carries it to
rank 0, which writes the traceback and the last line, and ends every rank. A rank whose error was caused by another one
says so, and the other is named.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

from hvdkit.cluster.logs import last_line, write_line
from hvdkit.cluster.member import Member, end_process
from hvdkit.cluster.progress import PROGRESS

# So long rank 0 has to answer; then this rank speaks for itself.
_ANSWER_SECONDS = 5.0
_LONGEST_TEXT = 60_000
_LET_DOWN = (
    "has been shut down",
    "left the job",
    "HorovodInternalError",
    "Connection reset",
    "Connection closed",
    "MPI_ERR",
    "Broken pipe",
    "gloo/transport",
)


class _Exit(SystemExit):
    """What ``sys.exit`` raises while a job runs: it knows when the interpreter itself takes its code, and ends."""

    @property
    def code(self) -> Any:  # type: ignore[override]
        value = self.args[0] if self.args else None
        if sys._getframe().f_back is None:
            _hooks.exit_code = 0 if value is None else value & 0xFF if isinstance(value, int) else 1
        return value


def _exit(status: Any = None, /) -> None:
    raise _Exit(*(() if status is None else (status,)))


class _Hooks:
    """The hooks of this process, while it is part of a world of several ranks."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.exit_code = 0
        self.pid = 0
        self._rank = 0
        self._communicator: Any = None
        self._before: tuple[Any, Any, Any] | None = None

    def install(self, rank: int, communicator: Any) -> None:
        """Begin to note failures of this rank."""
        if self._before is not None:
            return
        self._rank, self._communicator, self.pid, self.exit_code = rank, communicator, os.getpid(), 0
        self._before = (sys.excepthook, threading.excepthook, sys.exit)
        sys.excepthook, threading.excepthook = self._uncaught, self._uncaught_in_thread
        sys.exit = _exit  # type: ignore[assignment]

    def remove(self) -> None:
        """Give back the hooks that :meth:`install` replaced."""
        self.member = None
        if self._before is not None:
            sys.excepthook, threading.excepthook, sys.exit = self._before
            self._before = None

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self.pid:  # a forked child: no rank
            assert self._before is not None
            self._before[0](kind, error, trace)
            return
        self._end(kind, error, trace, None)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self.pid or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            assert self._before is not None
            self._before[1](args)
            return
        self._end(args.exc_type, args.exc_value, args.exc_traceback, args.thread.name if args.thread else "?")

    def _end(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, thread: str | None
    ) -> None:
        """End all ranks: by the channel, or by MPI, or by this rank's own end, which shuts Horovod down everywhere."""
        interrupted = issubclass(kind, KeyboardInterrupt)
        lines = [] if interrupted else "".join(traceback.format_exception(kind, error, trace)).splitlines()
        text = "\n".join(f"[rank {self._rank}] {line}" for line in lines)
        where = "" if thread is None else f" (in thread {thread})"
        cause = "KeyboardInterrupt" if interrupted else f"{kind.__name__}: {cause_of(error)}{where}"
        code, verb = (130, "was interrupted") if interrupted else (1, "failed")
        if self.member is not None:
            record = {"cause": cause, "verb": verb, "code": code, "victim": is_victim(error)}
            self.member.fail(text=text[-_LONGEST_TEXT:], **record)
            self.member.wait(_ANSWER_SECONDS)
        line = last_line(self._rank, socket.gethostname(), verb, PROGRESS.step, cause)
        write_line("\n".join([text, line]) if text else line)
        if self.member is None and self._communicator is not None:
            sys.stdout.flush()
            self._communicator.Abort(code)
        if self.member is not None or thread is not None:
            end_process(code)

    def leave(self) -> None:
        """Say that this rank ends, at the interpreter's exit; rank 0 ends it where others do not end."""
        if self.member is None:
            return
        if self.exit_code:
            cause = f"sys.exit({self.exit_code}) while other ranks went on"
            self.member.fail(cause=cause, code=self.exit_code, leaving=True)
            if not self.member.wait(_ANSWER_SECONDS):
                end_process(self.exit_code)
        self.member.leave()


_hooks = _Hooks()
watch = _hooks.install
unwatch = _hooks.remove
leave = _hooks.leave


def pid() -> int:
    """Return the process that is a rank; a child that it forked is none."""
    return _hooks.pid


def exit_code() -> int:
    """Return the code with which this rank ends by ``sys.exit``, as far as is known; 0 while it runs."""
    return _hooks.exit_code


def member() -> Member | None:
    """Return this rank's end of the watchdog, or None where there is none."""
    return _hooks.member


def report_to(member: Member | None) -> None:
    """From now on this rank's failures go to rank 0 through ``member``."""
    _hooks.member = member


def is_victim(error: BaseException) -> bool:
    """Return True for an error by which a rank learns that another one is gone."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "HorovodInternalError" in names:
        return True
    return bool(names & {"OpError", "ClusterError"}) and any(part in str(error) for part in _LET_DOWN)


def cause_of(error: BaseException) -> str:
    """Return the one line of an error's message that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if any("has been shut down" in line for line in lines):
        return "another rank left the job, and its own lines say why"
    # TensorFlow puts the cause between "Graph execution error:", with the places it passed through, and the node.
    frame = ("Graph execution error", "Detected at", "File ", "[[{{node")
    told = [line for line in lines if not line.startswith(frame)] or lines
    return told[0] if lines[0] in told else told[-1]
