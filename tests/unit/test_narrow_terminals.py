"""What ``hvdkit run`` rewrites on a terminal never wraps, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import unicodedata

import pytest

from hvdkit.commands.run.attempt import start_lines
from hvdkit.commands.run.output import OutputWriter

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FORMS = start_lines(12.4, size=64, started=64, initialized=5)


class Screen:
    """A terminal; ``shown`` are the lines that are visible in the end, ``widest`` the longest one ever rewritten."""

    def __init__(self, columns, monkeypatch, term="xterm-256color", redirected=None):
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setenv("TERM", term)
        self.file = os.fdopen(theirs, "wb", buffering=0)
        self.output = OutputWriter({1: redirected or self.file, 2: self.file})
        self.output.begin(2)

    def written(self):
        """Return what has been written, and close the terminal."""
        assert self.output.finish(10.0)
        self.output.end()
        assert self.output.finish(10.0)
        self.file.close()
        data = bytearray()
        try:
            while part := os.read(self.ours, 65536):
                data += part
        except OSError:  # the other end is closed
            pass
        os.close(self.ours)
        return data.decode()


def cells(text):
    """Return how many columns a text takes."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in ESCAPE.sub("", text))


@pytest.mark.parametrize("columns", [1, 5, 10, 34, 35, 40, 80, 200])
def test_the_progress_of_the_start_fits_and_disappears(columns, monkeypatch):
    screen = Screen(columns, monkeypatch)
    for second in range(3):
        screen.output.show_start(*start_lines(second, size=2, started=2, initialized=0))
    screen.output.show_start(*FORMS)
    screen.output.feed(0, 1, b"hello\n")
    screen.output.ended(0)
    parts = re.split("\r\x1b\\[K", screen.written())
    rewritten = parts[1:5]
    assert all(cells(part) < max(columns, 1) for part in rewritten), rewritten
    assert [line for line in parts[-1].splitlines() if line] == ["[rank 0] hello"]
    if columns >= 10:
        assert rewritten[-1].rstrip().endswith("12 s") == (columns <= 34), rewritten
    if columns >= 40:
        assert "initialized" in rewritten[-1] or "hk.init()" in rewritten[-1]


def test_the_width_is_that_of_the_terminal_that_shows_it(monkeypatch, tmp_path):
    """Standard output may be a file; COLUMNS may be that of another terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    with (tmp_path / "out.txt").open("wb", buffering=0) as file:
        screen = Screen(40, monkeypatch, redirected=file)
        screen.output.show_start(*FORMS)
        parts = screen.written().split("\r\x1b[K")
    assert len(parts) == 3 and 0 < cells(parts[1]) < 40


def test_a_terminal_without_a_size_has_80_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    screen = Screen(0, monkeypatch)
    screen.output.show_start(*FORMS)
    assert screen.written().split("\r\x1b[K")[1] == FORMS[0]


def test_wide_characters_of_a_progress_bar_do_not_wrap(monkeypatch):
    screen = Screen(40, monkeypatch)
    for number in range(30):
        screen.output.feed(0, 1, ("\r学習 " + "🟩" * number).encode())
    parts = screen.written().split("\r\x1b[K")
    assert max(map(cells, parts)) == 38  # 39 with half a character


def test_colors_do_not_outlive_a_line_that_is_cut(monkeypatch):
    screen = Screen(20, monkeypatch)
    screen.output.feed(0, 1, b"\r\x1b[32m" + b"#" * 40 + b"\x1b[0m")
    assert "\x1b[32m##########\x1b[0m" in screen.written()


def test_a_dumb_terminal_gets_whole_lines_without_escape_sequences(monkeypatch):
    screen = Screen(40, monkeypatch, term="dumb")
    assert not screen.output.has_terminal
    screen.output.show_start(*FORMS)
    for number in range(5):
        screen.output.feed(0, 1, b"\r%d/4" % number)
    screen.output.feed(0, 1, b"\n")
    screen.output.feed(1, 1, b"\r4/4\n")
    assert screen.written() == "[ranks 0-1] 4/4\r\n"


def test_part_of_a_line_does_not_divide_what_ranks_write_alike(monkeypatch):
    """Python writes the line of a SyntaxError that marks the place in several parts."""
    screen = Screen(80, monkeypatch)
    screen.output.feed(0, 2, b'  File "train.py", line 8\n    fit((x)\n    ^', is_starting=True)
    screen.output.feed(0, 2, b"^\nSyntaxError\n", is_starting=True)
    screen.output.feed(1, 2, b'  File "train.py", line 8\n    fit((x)\n    ^^\nSyntaxError\n', is_starting=True)
    lines = ESCAPE.sub("", screen.written()).replace("\r\n", "\n").removesuffix("\n").split("\n")
    assert [line.rpartition("\r")[2] for line in lines] == [
        '[ranks 0-1]   File "train.py", line 8',
        "[ranks 0-1]     fit((x)",
        "[ranks 0-1]     ^^",
        "[ranks 0-1] SyntaxError",
    ]
