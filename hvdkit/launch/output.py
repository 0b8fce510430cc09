"""The output of all ranks as one stream of whole lines, and a log of each rank."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
from pathlib import Path
from typing import BinaryIO

CLEAR = b"\r\x1b[K"
_TAG = re.compile(rb"\[rank \d+\] ")
# What a progress bar writes before it writes its line again, and while it hides the cursor; what takes no room.
_ERASED = re.compile(rb".*\x1b\[2K|\x1b\[0?K", re.DOTALL)
_CURSOR = re.compile(rb"\x1b\[\?25[hl]")
_ESCAPE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")


class Output:
    """Write whole lines with the rank before them; rank 0's progress bar stays below them on a terminal.

    A progress bar writes a line again and again with a carriage return between. On a terminal rank 0's is shown as it
    grows; of all others, and in files, a line is what was left of it when it ended.

    Args:
        files: standard output (1) and standard error (2).
        logs: folder for a log of each rank, or None.
    """

    def __init__(self, files: dict[int, BinaryIO], logs: Path | None = None) -> None:
        self._files = files
        self._logs = logs
        self._open_logs: dict[int, BinaryIO] = {}
        self._begun: dict[tuple[int, int], bytes] = {}
        self._is_terminal = {channel: file.isatty() for channel, file in files.items()}
        self._shown = b""

    def feed(self, rank: int, channel: int, data: bytes) -> None:
        """Take what ``rank`` wrote; whole lines are written on at once."""
        if self._logs is not None:
            self._write_log(rank, data)
        *lines, rest = (self._begun.get((rank, channel), b"") + data).split(b"\n")
        # Of what a progress bar has overwritten nothing is kept, lest it grow for as long as training lasts.
        head, _, tail = rest.rstrip(b"\r").rpartition(b"\r")
        rest = (tail or head) + (b"\r" if rest.endswith(b"\r") else b"")
        self._begun[rank, channel] = rest
        tag = b"[rank %d] " % rank
        on_terminal = rank == 0 and self._is_terminal[channel]
        if lines:
            if on_terminal:  # the bar that is shown has become a line, or is written again below
                self._show(b"")
            # hvdkit's own lines have a tag already, for launchers that give none; rank 0 writes what others have said.
            shown = [line if _TAG.match(line) else tag + line for line in map(final, lines)]
            self.write(channel, b"".join(line + b"\n" for line in shown))
        if on_terminal:
            bar = final(rest)
            self._show(tag + bar if bar else b"")

    def write(self, channel: int, data: bytes) -> None:
        """Write lines as they are, with one call, above a progress bar."""
        bar, self._shown = self._shown, b""
        with contextlib.suppress(OSError):  # whoever reads no more, or a disk that is full, does not end the job
            _write_all(self._files[channel], (CLEAR if bar else b"") + data)
        self._show(bar)

    def line(self, text: str) -> None:
        """Write a line of ``hvdkit run`` itself on standard error."""
        self.write(2, text.encode(errors="replace") + b"\n")

    def ended(self, rank: int) -> None:
        """Write what is left of a line that ``rank`` did not end, and close its log."""
        for channel in (1, 2):
            if rest := final(self._begun.pop((rank, channel), b"")):
                self._show(b"")
                self.write(channel, b"[rank %d] %b\n" % (rank, rest))
        if rank in self._open_logs:
            self._open_logs.pop(rank).close()

    def note(self, size: int, text: str) -> None:
        """Write a line into the logs of all ranks."""
        if self._logs is not None:
            for rank in range(size):
                self._write_log(rank, text.encode() + b"\n")

    def _write_log(self, rank: int, data: bytes) -> None:
        """Write to a rank's log. A disk that is full ends the logs, not the job."""
        assert self._logs is not None
        try:
            if rank not in self._open_logs:
                self._open_logs[rank] = (self._logs / f"rank-{rank}.log").open("ab", buffering=0)
            _write_all(self._open_logs[rank], data)
        except OSError as error:
            self.line(f"hvdkit run: {self._logs} cannot be written ({error.strerror}): no more logs of ranks")
            self._logs = None

    def _show(self, bar: bytes) -> None:
        """Show ``bar`` on the terminal's last line, in place of the one before."""
        if bar == self._shown:
            return
        terminal = next((file for channel, file in self._files.items() if self._is_terminal[channel]), None)
        if terminal is not None:
            width = shutil.get_terminal_size().columns
            with contextlib.suppress(OSError):
                _write_all(terminal, CLEAR + cut(bar, width - 1))
        self._shown = bar


def final(line: bytes) -> bytes:
    """Return what a terminal shows of a line in the end.

    Example:
        >>> final(b" 10%\\r 50%\\r100%\\r")
        b'100%'
        >>> final(b" 10%\\r\\x1b[2K100%")
        b'100%'
    """
    shown = _CURSOR.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2]
    erased = _ERASED.match(shown)
    return shown[erased.end() :] if erased else shown


def cut(line: bytes, width: int) -> bytes:
    """Return the first ``width`` characters of a line as a terminal shows it, with all of its colours.

    Example:
        >>> cut("\\x1b[32m━━━━\\x1b[0m 7/9".encode(), 6).decode()
        '\\x1b[32m━━━━\\x1b[0m 7'
    """
    parts = _ESCAPE.split(line.decode(errors="replace"))
    for place in range(0, len(parts), 2):  # escape sequences are at the odd places
        parts[place] = parts[place][: max(0, width)]
        width -= len(parts[place])
    return "".join(parts).encode()


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file.fileno(), view) :]
        except BlockingIOError:  # a terminal, or a pipe, that somebody else has set so
            select.select([], [file], [], 1.0)
