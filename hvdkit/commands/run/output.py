"""The output of all ranks as one stream of whole lines, and one log per rank."""

from __future__ import annotations

import itertools
import os
import re
import time
import unicodedata
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

from hvdkit.cluster.log_filter import CHATTER
from hvdkit.commands.run.alike_lines import START_SECONDS, WAIT_SECONDS, AlikeLines
from hvdkit.machine.terminal import can_rewrite, columns_of, is_terminal
from hvdkit.watchdog.lines import Writer, write_all

CLEAR = b"\r\x1b[K"
# Bytes above which a line is written in parts.
LONGEST_LINE = 1 << 20
# Escape sequences: erasing a line and hiding the cursor, as progress bars do; and all those without width.
_ERASED = re.compile(rb".*\x1b\[2K|\x1b\[0?K", re.DOTALL)
_CURSOR = re.compile(rb"\x1b\[\?25[hl]")
# The last line of Python's report of an exception.
_ERROR = re.compile(rb"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Group)(: .*)?")
_TRACEBACK = b"Traceback (most recent call last):"
_ESCAPE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")

_CHATTER = tuple(beginning.encode() for beginning in CHATTER)

Shown = Literal["all", "merged", "rank0", "files"]
"""Which lines are shown: of all ranks; those that ranks write alike once; of rank 0; none."""


class OutputWriter:
    """Writes whole lines tagged with the rank; on a terminal, rank 0's progress bar stays below them.

    A progress bar rewrites its line after a carriage return. On a terminal, rank 0's progress bar is shown live. For
    other ranks, and in files, only the final version of each line is written.

    Args:
        files: standard output (1) and standard error (2).
        logs: folder for a log of each rank, or None.
        shown: which lines are shown; None for "merged" on a terminal, and "all" otherwise.

    Attributes:
        has_output: whether a rank has written anything.
    """

    def __init__(self, files: dict[int, BinaryIO], logs: Path | None = None, shown: Shown | None = None) -> None:
        self._files = files
        self._logs = logs
        self._open_logs: dict[int, BinaryIO] = {}
        self._partial: dict[tuple[int, int], bytes] = {}
        # Those whose last line can be written again.
        self._terminals = [channel for channel, file in files.items() if can_rewrite(file)]
        self._shown: Shown = shown or ("merged" if files and all(map(is_terminal, files.values())) else "all")
        self._lines = AlikeLines()
        self._seconds = WAIT_SECONDS if self._shown == "merged" else 0.0  # that lines wait
        self._interrupted: dict[int, list[bytes]] = {}  # tracebacks of ranks that Ctrl-C has interrupted
        self._drops_chatter = os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"
        self.has_output = False
        self._bar = b""  # the progress bar that the terminal shows
        self._writers: dict[tuple[int, int], Writer] = {}
        self._last_lines: dict[int, bytes] = {}  # of each rank's standard error

    @property
    def has_terminal(self) -> bool:
        """True if standard error, to which ``hvdkit run`` writes its own lines, is a terminal that rewrites lines."""
        return 2 in self._terminals

    @property
    def waiting(self) -> int:
        """Number of bytes not yet read by the reader."""
        return sum(writer.waiting for writer in self._writers.values())

    def finish(self, seconds: float) -> bool:
        """Wait at most ``seconds`` per file until all data is written; return True if it is."""
        return all(writer.finish(seconds) for writer in self._writers.values())

    def report_loss(self) -> None:
        """Write a line if output was lost. A full disk does not end the job."""
        if problems := {writer.problem for writer in self._writers.values() if writer.problem is not None}:
            why = ", ".join(sorted(problems))
            self.line(f"hvdkit run: standard output or error could not be written ({why}): lines of ranks were lost")

    def feed(self, rank: int, channel: int, data: bytes, *, is_starting: bool = False) -> None:
        """Add output of ``rank``, and write the lines that it completes.

        Args:
            channel: 1 or 2, standard output or error.
            is_starting: it has not called ``hk.init()``: what ranks write alike to standard error is shown once, as
                nothing else joins the tracebacks of errors in every rank. TensorFlow's startup messages, which come if
                a program imports it before hvdkit, are only in the logs, unless ``TF_CPP_MIN_LOG_LEVEL`` is 0.
        """
        if self._logs is not None:
            self._write_log(rank, data)
        *lines, rest = (self._partial.get((rank, channel), b"") + data).split(b"\n")
        if is_starting and channel == 2 and self._drops_chatter:
            lines = [line for line in lines if not line.startswith(_CHATTER)]
        if not self.has_output and (lines or rest) and not rest.startswith(_CHATTER):
            self.has_output = True
            self._show(b"")  # the progress of the start
        is_rewritten = b"\r" in rest
        # Drop what a progress bar has overwritten. Otherwise the line would grow during the whole training.
        head, _, tail = rest.rstrip(b"\r").rpartition(b"\r")
        rest = (tail or head) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > LONGEST_LINE:
            lines = [*lines, rest]
            rest = b""
        self._partial[rank, channel] = rest
        self._add(rank, channel, lines, seconds=START_SECONDS if is_starting and channel == 2 else self._seconds)
        if rank == 0 and channel in self._terminals and self._shown != "files":
            bar = visible(rest)
            if bar and is_rewritten:  # not part of a line, of which Python writes those of a SyntaxError
                self._lines.hurry(rank)
                self.tick(time.monotonic())
            self._show(b"[rank 0] " + bar if bar else b"")

    def interrupt(self, rank: int) -> None:
        """After Ctrl-C, do not write a traceback of KeyboardInterrupt in which ``rank`` ends."""
        self._interrupted.setdefault(rank, [])

    def _add(self, rank: int, channel: int, lines: list[bytes], *, seconds: float) -> None:
        if not lines:
            return
        if channel == 2 and (held := self._interrupted.get(rank)) is not None:
            begins = (index for index, line in enumerate(lines) if line.startswith(_TRACEBACK))
            number = 0 if held else next(begins, len(lines))
            held += lines[number:]
            lines = lines[:number]
        if channel == 2:
            self._last_lines[rank] = next(filter(None, reversed(lines)), self._last_lines.get(rank, b""))
        if self._shown == "files" or (self._shown == "rank0" and rank != 0):
            return
        now = time.monotonic()
        for line in lines:
            if self._lines.is_full:  # each line is compared with those that wait
                self.tick(now)
            self._lines.add(rank, channel, visible(line), now, seconds=seconds)
        was_bar = False
        if rank == 0 and channel in self._terminals:  # the bar has become one of the lines
            self._show(b"")
            was_bar = any(b"\r" in line.rstrip(b"\r") for line in lines)
        self.tick(now, everything=was_bar)  # what was shown as a bar stays visible

    def begin(self, size: int) -> None:
        """Expect output of this many ranks."""
        self._lines.begin(size)
        self.has_output = False

    def show_start(self, *forms: str) -> None:
        """Show the progress of the start on a terminal, until there is output of ranks.

        Args:
            forms: texts of the same progress, the longest first: the first one that fits is shown. None: no progress.
        """
        if self.has_terminal and not self.has_output:
            fitting = [form for form in forms if len(form) <= self._columns]
            self._show((fitting or list(forms[-1:]) or [""])[0].encode())

    def end(self) -> None:
        """Write all lines that wait, and show no progress any more."""
        self._show(b"")
        self.tick(time.monotonic(), everything=True)

    def tick(self, now: float, *, everything: bool = False) -> None:
        """Write the lines that have waited long enough for other ranks to write the same, or all that wait."""
        for channel, lines in groupby(self._lines.take(now, everything=everything), key=itemgetter(0)):
            self._write_above_bar(channel, b"".join(line + b"\n" for _, line in lines))

    def write(self, channel: int, data: bytes) -> None:
        """Write lines unchanged, after those that wait, with one call, above the progress bar."""
        self.tick(time.monotonic(), everything=True)
        self._write_above_bar(channel, data)

    def select(self, data: bytes) -> bytes:
        """Return the lines that are written: all, unless a subclass leaves some out."""
        return data

    def _write_above_bar(self, channel: int, data: bytes) -> None:
        data = self.select(data)
        if not data:
            return
        if not self._bar or channel not in self._terminals:
            self._put(channel, data)
            return
        bar = self._bar
        self._bar = b""
        self._put(channel, CLEAR + data)
        self._show(bar)

    def line(self, text: str) -> None:
        """Write a line of ``hvdkit run`` for the user to standard error."""
        self.write(2, text.encode(errors="replace") + b"\n")

    def last_error(self, rank: int) -> str:
        """Return the exception with which the standard error of ``rank`` ends, or an empty string."""
        line = visible(self._last_lines.get(rank, b""))
        return line.decode(errors="replace") if _ERROR.fullmatch(line) else ""

    def ended(self, rank: int) -> None:
        """Write the incomplete last line of ``rank``, and close its log."""
        for channel in (1, 2):
            rest = self._partial.pop((rank, channel), b"")
            if visible(rest):
                self._add(rank, channel, [rest], seconds=self._seconds)
        held = self._interrupted.pop(rank, [])
        if held and not held[-1].startswith(b"KeyboardInterrupt"):
            self._add(rank, 2, held, seconds=WAIT_SECONDS)
        self._lines.ended(rank)
        self.tick(time.monotonic())
        if rank in self._open_logs:
            self._open_logs.pop(rank).close()

    def note(self, size: int, text: str) -> None:
        """Write a line to the logs of all ranks."""
        if self._logs is not None:
            for rank in range(size):
                self._write_log(rank, text.encode() + b"\n")

    def _write_log(self, rank: int, data: bytes) -> None:
        """Write to a rank's log. A full disk ends the logs, not the job."""
        assert self._logs is not None
        try:
            if rank not in self._open_logs:
                self._open_logs[rank] = (self._logs / f"rank-{rank}.log").open("ab", buffering=0)
            write_all(self._open_logs[rank].fileno(), data)
        except OSError as error:
            self.line(
                f"hvdkit run: {self._logs} cannot be written ({error.strerror}): logs of ranks are no longer written"
            )
            self._logs = None

    def _show(self, bar: bytes) -> None:
        """Show ``bar`` on the terminal's last line, replacing the previous bar."""
        if bar == self._bar:
            return
        if self._terminals:
            self._put(self._terminals[0], CLEAR + truncate(bar, self._columns))
        self._bar = bar

    @property
    def _columns(self) -> int:
        """Columns for a line that is rewritten; a line that fills the terminal would wrap on some."""
        return columns_of(self._files[self._terminals[0]]) - 1

    def _put(self, channel: int, data: bytes) -> None:
        """Write to a file. If both channels are the same terminal or pipe, the order of writes is preserved."""
        descriptor = self._files[channel].fileno()
        status = os.fstat(descriptor)
        self._writers.setdefault((status.st_dev, status.st_ino), Writer(descriptor)).write(data)


def visible(line: bytes) -> bytes:
    """Return the visible part of a line: what follows its last carriage return or erasure.

    Example:
        >>> visible(b" 10%\\r 50%\\r100%\\r")
        b'100%'
        >>> visible(b" 10%\\r\\x1b[2K100%")
        b'100%'
    """
    shown = _CURSOR.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2]
    erased = _ERASED.match(shown)
    return shown[erased.end() :] if erased else shown


def truncate(line: bytes, width: int) -> bytes:
    """Return what fits into the first ``width`` columns of a line, with all of its escape sequences for colors.

    Example:
        >>> truncate("\\x1b[32m━━━━\\x1b[0m 7/9".encode(), 6).decode()
        '\\x1b[32m━━━━\\x1b[0m 7'
        >>> truncate("学習 7/9".encode(), 6).decode()
        '学習 7'
    """
    parts = _ESCAPE.split(line.decode(errors="replace"))
    for index in range(0, len(parts), 2):  # odd indices are escape sequences
        ends = list(itertools.accumulate(map(_columns_of_character, parts[index])))
        fitting = sum(end <= width for end in ends)
        if fitting < len(ends):
            width = 0
        elif ends:
            width -= ends[-1]
        parts[index] = parts[index][:fitting]
    return "".join(parts).encode()


def _columns_of_character(character: str) -> int:
    if character == "\t":
        return 8  # at most
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
