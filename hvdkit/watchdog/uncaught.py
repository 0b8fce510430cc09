"""Reports uncaught exceptions, which end the job.

Hooks catch the exceptions of all threads. The sentinel forwards them to the coordinator, which writes the traceback and
the last line, and ends every rank. If an error was caused by another rank, the last line names that rank.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from hvdkit.errors import SEE, HvdkitError, printable, see
from hvdkit.watchdog.ending import Exit, end_process, ending, is_interrupt, is_victim
from hvdkit.watchdog.events import Failed, Raised
from hvdkit.watchdog.lines import flush_streams, write_line
from hvdkit.watchdog.rank_texts import tagged
from hvdkit.watchdog.suggestions import add_suggestion
from hvdkit.watchdog.tracebacks import format_exception

if TYPE_CHECKING:
    from hvdkit.watchdog.reporter import Reporter

_LONGEST_TEXT = 60_000
_OF_ANOTHER_RANK = "_hvdkit_of_another_rank"  # attribute of a copy of another rank's exception
# The op that runs a graph, as TensorFlow names it: in a frame of its own that it does not remove from tracebacks.
_GRAPH = re.compile(r"__(?:inference|forward)_(.*)_\d+")


def blame_another_rank(error: Exception) -> None:
    """Have the report of an exception, which is a copy of another rank's, leave the blame to that rank."""
    setattr(error, _OF_ANOTHER_RANK, True)


class UncaughtErrors:
    """Ends all ranks on an uncaught exception in this process."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._rank = 0
        self._abort: Callable[[int], None] | None = None
        self._before: tuple[Any, ...] = ()

    def install(self, rank: int, release: Callable[[], None], abort: Callable[[int], None] | None) -> None:
        """Start reporting failures of this rank.

        Args:
            rank: this rank.
            release: releases this rank's threads from collectives.
            abort: ends all ranks if this rank has no sentinel; None without MPI.
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
            write_line("\n".join(_traceback(error.with_traceback(trace))))
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
        lines = [] if is_interrupted else _traceback(error.with_traceback(trace))
        lines += pages_of(error)
        text = "\n".join(lines)[-_LONGEST_TEXT:]
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

    def raised(self, error: BaseException) -> Raised:
        """Return the report of an exception that the program may catch."""
        text = "\n".join(_traceback(error))[-_LONGEST_TEXT:]
        return Raised(cause=f"{type(error).__name__}: {cause_of(error)}", text=text)

    def _failed(self, error: BaseException, text: str, thread: str | None) -> Failed:
        """Return the report of an uncaught exception."""
        is_interrupted = is_interrupt(error)
        where = "" if thread is None else f" (in thread {thread})"
        return Failed(
            cause="KeyboardInterrupt" if is_interrupted else f"{type(error).__name__}: {cause_of(error)}{where}",
            verb="was interrupted" if is_interrupted else "failed",
            code=130 if is_interrupted else exit_code_of(error),
            text=text,
            follows=is_victim(error) or hasattr(error, _OF_ANOTHER_RANK),
            step=self._reporter.recorder.step,
            busy=self._reporter.reason,
        )


def _traceback(error: BaseException) -> list[str]:
    """Return the traceback. Its first line is the cause if TensorFlow puts that after all nodes of a graph."""
    lines = [printable(line, keep="\t") for line in format_exception(error)]
    is_hidden = "Graph execution error" in str(error)
    return [f"{type(error).__name__}: {cause_of(error)}", *lines] if is_hidden else lines


def with_cause_first(error: Exception, rank: int) -> Exception:
    """Return an error of TensorFlow with its cause and the rank in the first line; other errors unchanged.

    TensorFlow puts the cause of an error in a graph after a list of the graph's nodes.
    """
    text = str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OpError" not in names or not text.startswith("Graph execution error"):
        return error
    explained = type(error)(error.node_def, error.op, f"rank {rank}: {cause_of(error)}\n\n{text}")  # type: ignore
    return explained.with_traceback(error.__traceback__)


def ended_a_step(error: BaseException, graphs: Collection[str]) -> bool:
    """Return True if one of ``graphs``, the functions of TensorFlow that have collectives, raised an exception."""
    trace = error.__traceback__
    while trace is not None:
        name = _GRAPH.fullmatch(str(trace.tb_frame.f_locals.get("op_name")))
        if name is not None and name[1] in graphs:
            return True
        trace = trace.tb_next
    return False


def left_a_loop(error: BaseException, callers: Mapping[CodeType, Collection[int]]) -> bool:
    """Return True if an exception that is being handled has ended a function or a loop with steps.

    A handler inside the loop may continue it, e.g. after it has read a batch again.

    Args:
        error: the exception.
        callers: the code that called functions with collectives, and the lines of the calls.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    handler = trace.tb_frame
    line = trace.tb_lineno
    for start, end in _loops_of(handler.f_code.co_filename, callers.get(handler.f_code, ())):
        if start <= line <= end and not start <= handler.f_lineno <= end:
            return True
    while (trace := trace.tb_next) is not None:  # these functions have ended
        if trace.tb_frame.f_code in callers:
            return True
    return False


def _loops_of(file: str, lines: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last line of the innermost loop around each of ``lines``."""
    if not lines:
        return
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return
    loops = [(one.lineno, one.end_lineno or 0) for one in ast.walk(tree) if isinstance(one, (ast.For, ast.While))]
    for line in lines:
        around = [loop for loop in loops if loop[0] <= line <= loop[1]]
        if around:
            yield max(around)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that does not catch ``error``."""
    return error.exit_code if isinstance(error, HvdkitError) else 1


def pages_of(error: BaseException) -> list[str]:
    """Return the line that names the documentation's page about ``error``; empty if its message names one."""
    if not isinstance(error, HvdkitError) or error.page is None or SEE in str(error):
        return []
    return [see(error.page)]


_TRACEBACK = "Traceback (most recent call last):"
# What TensorFlow puts before the message of an error of an eager op, e.g. of a dataset's iterator.
_FUNCTION_NODE = re.compile(r"^\{\{function_node [^}]*\}\} ")
# Keras's colors, and the line that it puts before the message of a layer's error.
_COLOR = re.compile(r"\x1b\[[0-9;]*m|\\x1b\[[0-9;]*m")
_IN_A_LAYER = "Exception encountered when calling"


def cause_of(error: BaseException) -> str:
    """Return the most informative line of an error's message, without the name of TensorFlow's function."""
    text = _COLOR.sub("", str(error))
    lines = [_FUNCTION_NODE.sub("", line.strip()) for line in text.splitlines() if line.strip()] or ["no message"]
    if lines[0].startswith(_IN_A_LAYER) and len(lines) > 1:
        return f"{lines[1]} ({lines[0].rstrip('.')})"
    if "Graph execution error:" in lines[1:2]:  # see with_cause_first
        return lines[0].partition(": ")[2]
    if any("has been shut down" in line for line in lines):
        return "another rank left the job; its own error is printed above"
    if lines[0].startswith("Graph execution error") and _TRACEBACK in lines:
        return lines[lines.index(_TRACEBACK) - 1]  # an error of Python in a graph, such as one of a generator
    # TensorFlow puts the cause between "Graph execution error:" with its stack, and the node.
    frame = ("Graph execution error", "Detected at", "File ", "[[{{node")
    causes = [line for line in lines if not line.startswith(frame)] or lines
    return causes[0] if lines[0] in causes else causes[-1]
