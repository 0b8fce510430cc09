"""Command-line output: color and boxes on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

# tyro's error report in ASCII when written to a file: a title, then paragraphs separated by rules.
_TITLE, _RULE = re.compile(r" \S"), re.compile(r" *-{3,} *$")


def on_terminal() -> bool:
    """Return whether the user sees this process on a terminal with more capabilities than printing lines.

    Both stdout and stderr must be terminals: Open MPI's mpirun gives its ranks a pseudo-terminal as stdout even if its
    own output goes to a file.
    """
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def in_colour() -> bool:
    """Return whether to write color codes: on a terminal, unless ``NO_COLOR`` is set (https://no-color.org)."""
    return on_terminal() and not os.environ.get("NO_COLOR")


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return lines with aligned columns; columns in ``right`` are right-aligned, the others left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def parse(
    kind: Any,
    *,
    prog: str | None = None,
    description: str | None = None,
    args: Sequence[str] | None = None,
    quiet: bool = False,
) -> Any:
    """Parse a command line into a config of type ``kind``, like ``tyro.cli``.

    Without a terminal, help and error reports are plain text, each written with a single call.

    Args:
        kind: A config dataclass, or a union of them, one per subcommand.
        prog: The program name in messages; ``sys.argv[0]`` by default.
        description: The first paragraph of the help; the docstring of ``kind`` by default.
        args: The arguments; ``sys.argv[1:]`` by default.
        quiet: Print nothing, because another rank reports for all.

    Raises:
        SystemExit: The user requested help (code 0), or the arguments are invalid (code 2).

    Example::

        config = parse(Config, description=__doc__)
    """
    import tyro

    if in_colour() and not quiet:
        return tyro.cli(kind, prog=prog, description=description, args=args)
    written = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    try:
        with contextlib.redirect_stdout(written["stdout"]), contextlib.redirect_stderr(written["stderr"]):
            return tyro.cli(kind, prog=prog, description=description, args=args)
    finally:
        if not quiet:
            _write(sys.stdout, written["stdout"].getvalue())
            _write(sys.stderr, plain(written["stderr"].getvalue()))


def plain(report: str) -> str:
    """Return tyro's error report without its title and the rules between paragraphs.

    Example:
        >>> plain(" Unrecognized options\\n  Unrecognized options: --wrong\\n  ------\\n  For help, x --help\\n \\n")
        'Unrecognized options: --wrong\\nFor help, x --help\\n'
    """
    lines = [line.rstrip() for line in report.splitlines() if not _TITLE.match(line) and not _RULE.match(line)]
    return textwrap.dedent("".join(f"{line}\n" for line in lines if line))


def _write(file: Any, text: str) -> None:
    if text:
        file.write(text)
        file.flush()
