"""One rank that fails ends the whole job, and one last line says who failed, at which step, and why.

Hooks note what ends this rank: an exception in any thread, ``sys.exit(n)``. The watchdog's channel then carries it to
rank 0, which writes the traceback and the last line, and has every rank end. If an error was caused by another rank,
that rank is named.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hvdkit.cluster.ending import ENDING, Exit, end_process, flush_files
from hvdkit.cluster.logs import write_line
from hvdkit.cluster.member import Member
from hvdkit.cluster.progress import PROGRESS
from hvdkit.cluster.report import FailureReport, hand_over, take_pipe
from hvdkit.errors import HvdkitError

# So long rank 0 has to answer; then this rank speaks for itself.
_ANSWER_SECONDS = 5.0
_LONGEST_TEXT = 60_000
_LET_DOWN = (
    "has been shut down",
    "has not been initialized",
    "left the job",
    "HorovodInternalError",
    "Connection reset",
    "Connection closed",
    "MPI_ERR",
    "Broken pipe",
    "gloo/transport",
)


def _exit(status: Any = None, /) -> None:
    raise Exit(*(() if status is None else (status,)))


class _Hooks:
    """The hooks of this process, while it is part of a world."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.pid = 0
        self._rank = 0
        self._communicator: Any = None
        self._before: tuple[Any, Any, Any] | None = None

    def install(self, rank: int, communicator: Any, release: Callable[[], None]) -> None:
        """Begin to note failures of this rank.

        Args:
            rank: this rank.
            communicator: aborts all ranks if there is no watchdog; None without MPI.
            release: releases all ranks from Horovod's collectives.
        """
        if self._before is not None:
            return
        take_pipe()
        ENDING.prepare(release, is_victim)
        self._rank, self._communicator, self.pid = rank, communicator, os.getpid()
        self._before = (sys.excepthook, threading.excepthook, sys.exit)
        sys.excepthook, threading.excepthook = self._uncaught, self._uncaught_in_thread
        sys.exit = _exit  # type: ignore[assignment]

    def install_alone(self) -> None:
        """In a world of one, have this process end with the exit code of an error's class; nothing else changes."""
        if self._before is None:
            take_pipe()
            self.pid = os.getpid()
            self._before = (sys.excepthook, threading.excepthook, sys.exit)
            sys.excepthook = self._uncaught_alone

    def remove(self) -> None:
        """Give back the hooks that :meth:`install` replaced."""
        self.member = None
        if self._before is not None:
            ENDING.forget()
            sys.excepthook, threading.excepthook, sys.exit = self._before
            self._before = None

    def _uncaught_alone(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        assert self._before is not None
        self._before[0](kind, error, trace)
        if os.getpid() == self.pid and _exit_code_of(error) != 1:
            raise Exit(_exit_code_of(error))  # the interpreter ends with it

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
        victim, interrupted = is_victim(error), issubclass(kind, KeyboardInterrupt)
        lines = [] if interrupted else "".join(traceback.format_exception(kind, error, trace)).splitlines()
        text = "\n".join(f"[rank {self._rank}] {line}" for line in lines)
        where = "" if thread is None else f" (in thread {thread})"
        cause = "KeyboardInterrupt" if interrupted else f"{kind.__name__}: {cause_of(error)}{where}"
        code, verb = (130, "was interrupted") if interrupted else (_exit_code_of(error), "failed")
        if ENDING.begun:  # while ranks unwind: a collective that was released raises, which is not worth a traceback
            if text and not victim and not ENDING.has_caused(error):
                write_line(text)
        elif self.member is not None:
            record = {"cause": cause, "verb": verb, "code": code, "victim": victim}
            self.member.fail(text=text[-_LONGEST_TEXT:], **record)
            self.member.wait(_ANSWER_SECONDS)
        if ENDING.begun:
            if thread is None:
                ENDING.leave()
            return
        report = FailureReport(
            rank=self._rank, host=socket.gethostname(), verb=verb, cause=cause, step=PROGRESS.step, follows=victim
        )
        hand_over(report)
        write_line("\n".join([text, report.line()]) if text else report.line())
        if self.member is None and self._communicator is not None:
            sys.stdout.flush()
            self._communicator.Abort(code)
        if self.member is not None or thread is not None:
            end_process(code)
        raise Exit(code)

    def leave(self) -> None:
        """Say that this rank ends, at the interpreter's exit; rank 0 ends it where others do not end."""
        if self.member is None or ENDING.begun:
            return
        code = ENDING.exit_code
        if code:
            self.member.fail(cause=f"sys.exit({code}) while other ranks went on", code=code, leaving=True)
            answered = self.member.wait(_ANSWER_SECONDS)
            if ENDING.begun:
                return
            if not answered:
                end_process(code)
        self.member.leave()

    def finish(self) -> None:
        """After a failure: wait until all ranks have unwound, then let this interpreter take itself down."""
        if ENDING.begun and os.getpid() == self.pid:
            flush_files()  # the interpreter would, but only seconds later, on a busy host
            if self.member is not None:
                self.member.unwound()
            ENDING.finish()


_hooks = _Hooks()
watch = _hooks.install
watch_alone = _hooks.install_alone
unwatch = _hooks.remove
leave = _hooks.leave
finish = _hooks.finish


def pid() -> int:
    """Return the process that is a rank; a child that it forked is none."""
    return _hooks.pid


def exit_code() -> int:
    """Return the code with which this rank ends by ``sys.exit``, as far as is known; 0 while it runs."""
    return ENDING.exit_code


def member() -> Member | None:
    """Return this rank's end of the watchdog, or None where there is none."""
    return _hooks.member


def report_to(member: Member | None) -> None:
    """From now on this rank's failures go to rank 0 through ``member``."""
    _hooks.member = member


def _exit_code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HvdkitError) else 1


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
