"""Reports uncaught exceptions, which end the job.

Hooks catch the exceptions of all threads. The sentinel forwards them to the coordinator, which writes the traceback and
the last line, and ends every rank. If an error was caused by another rank, the last line names that rank.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import TracebackType

from hvdkit.errors import SEE, HvdkitError, see
from hvdkit.watchdog.ending import Exit, end_process, ending, is_interrupt, is_victim
from hvdkit.watchdog.events import Failed
from hvdkit.watchdog.lines import flush_streams, write_line
from hvdkit.watchdog.rank_texts import tagged
from hvdkit.watchdog.reporter import Reporter, reporter
from hvdkit.watchdog.suggestions import add_suggestion
from hvdkit.watchdog.tracebacks import LONGEST_TEXT, cause_of, report_lines

_OF_ANOTHER_RANK = "_hvdkit_of_another_rank"  # attribute of a copy of another rank's exception


def blame_another_rank(error: Exception) -> None:
    """Have the report of an exception, which is a copy of another rank's, leave the blame to that rank."""
    setattr(error, _OF_ANOTHER_RANK, True)


class UncaughtErrors:
    """Ends all ranks on an uncaught exception in this process."""

    def __init__(self, reporter: Reporter) -> None:
        # Returns what the last line adds about the training, which may be why an exception was raised, or "".
        self.doubt: Callable[[], str] = str
        self._reporter = reporter
        self._rank = 0
        self._abort: Callable[[int], None] | None = None
        self._before: tuple[Callable[..., object], ...] = ()

    def install(self, rank: int, release: Callable[[], None], abort: Callable[[int], None] | None) -> None:
        """Start reporting failures of this rank.

        ``release`` releases this rank's threads from collectives. ``abort`` ends all ranks if this rank has no
        sentinel; None without MPI.
        """
        if sys.excepthook == self._uncaught_alone:  # an error before hk.init() was caught
            self.remove()
        if not self._before:
            ending().prepare(release)
            self._rank = rank
            self._abort = abort
            self._before = (sys.excepthook, threading.excepthook)
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread

    def install_alone(self) -> None:
        """In a world of one rank, and before :meth:`install`: fold the traceback, and set the exit code."""
        if not self._before:
            self._before = (sys.excepthook, threading.excepthook)
            sys.excepthook = self._uncaught_alone

    def remove(self) -> None:
        """Restore the hooks that :meth:`install` replaced."""
        if self._before:
            ending().forget()
            sys.excepthook, threading.excepthook = self._before
            self._before = ()

    def _uncaught_alone(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._before[0] is sys.__excepthook__:
            add_suggestion(error)
            write_line("\n".join(report_lines(error.with_traceback(trace))))
        else:  # of a debugger or a shell
            self._before[0](kind, error, trace)
        if os.getpid() == self._reporter.pid:
            for line in pages_of(error):
                write_line(line)
            if self._reporter.saved is not None and not self._reporter.is_watched:
                write_line(f"hvdkit: {self._reporter.saved.text}")
            self._reporter.send(self._failed(error, "", None))
            if exit_code_of(error) != 1:
                raise Exit(exit_code_of(error))  # sets the interpreter's exit code

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._reporter.pid:  # a forked child is not a rank
            self._before[0](kind, error, trace)
            return
        self._end(error, trace, None)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if os.getpid() != self._reporter.pid or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            self._before[1](args)
            return
        self._end(args.exc_value, args.exc_traceback, args.thread.name if args.thread else "?")

    def _end(self, error: BaseException, trace: TracebackType | None, thread: str | None) -> None:
        """End all ranks: through the sentinel, by MPI's abort, or by ending this rank, which shuts Horovod down."""
        is_interrupted = is_interrupt(error)
        add_suggestion(error)
        lines = [] if is_interrupted else report_lines(error.with_traceback(trace))
        lines += pages_of(error)
        text = "\n".join(lines)[-LONGEST_TEXT:]
        shown = tagged([self._rank], text)
        failed = self._failed(error, text, thread)
        is_heard = False
        if not ending().begun:
            is_heard = self._reporter.fail(failed)
        # While ranks unwind, released collectives raise. These errors need no traceback.
        elif text and not failed.follows and not ending().has_caused(error):
            write_line(shown)
        if ending().begun:
            if thread is None:
                ending().leave()
            return
        at = "" if failed.step is None else f" at step {failed.step}"
        saved = "" if self._reporter.saved is None else f"; {self._reporter.saved.text}"
        line = f"hvdkit: rank {self._rank} on {socket.gethostname()} {failed.verb}{at}: {failed.cause}{saved}"
        write_line("\n".join([shown, line]) if text else line)
        if not is_heard and self._abort is not None:
            flush_streams()
            self._abort(failed.code)
        if is_heard or thread is not None:
            end_process(failed.code)
        raise Exit(failed.code)

    def _failed(self, error: BaseException, text: str, thread: str | None) -> Failed:
        """Return the report of an uncaught exception."""
        is_interrupted = is_interrupt(error)
        where = "" if thread is None else f" (in thread {thread})"
        follows = is_victim(error) or hasattr(error, _OF_ANOTHER_RANK)
        doubt = "" if is_interrupted or follows else self.doubt()
        return Failed(
            cause="KeyboardInterrupt" if is_interrupted else f"{type(error).__name__}: {cause_of(error)}{where}{doubt}",
            verb="was interrupted" if is_interrupted else "failed",
            code=130 if is_interrupted else exit_code_of(error),
            text=text,
            follows=follows,
            step=self._reporter.recorder.step,
            busy=self._reporter.reason,
        )


@cache
def uncaught_errors() -> UncaughtErrors:
    """Return the :class:`UncaughtErrors` of this process."""
    return UncaughtErrors(reporter())


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that does not catch ``error``."""
    return error.exit_code if isinstance(error, HvdkitError) else 1


def pages_of(error: BaseException) -> list[str]:
    """Return the line that names the documentation's page about ``error``; empty if its message names one."""
    if not isinstance(error, HvdkitError) or error.page is None or SEE in str(error):
        return []
    return [see(error.page)]
