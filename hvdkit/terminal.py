"""What a user sees of a command line: colour and boxes on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

# tyro's report of a mistake, written to a file in ASCII: a title, then paragraphs with rules between them.
_TITLE, _RULE = re.compile(r" \S"), re.compile(r" *-{3,} *$")


def on_terminal() -> bool:
    """Return whether a user watches this process on a terminal that can do more than print lines.

    Both outputs have to be terminals: Open MPI's mpirun gives its ranks a pseudo-terminal as standard output even if
    its own output goes to a file.
    """
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def in_colour() -> bool:
    """Return whether to write colour codes: on a terminal, unless ``NO_COLOR`` is set (https://no-color.org)."""
    return on_terminal() and not os.environ.get("NO_COLOR")


def parse(
    kind: Any,
    *,
    prog: str | None = None,
    description: str | None = None,
    args: Sequence[str] | None = None,
    quiet: bool = False,
) -> Any:
    """Return the ``kind`` of config that a command line describes, as ``tyro.cli`` does.

    Without a terminal, the help and the report of a mistake are plain text, each written with one call.

    Args:
        kind: A config dataclass, or a union of them, each a subcommand.
        prog: The program's name in messages; ``sys.argv[0]`` by default.
        description: What the help says first; the docstring of ``kind`` by default.
        args: The arguments; ``sys.argv[1:]`` by default.
        quiet: Print nothing: another rank reports for all.

    Raises:
        SystemExit: The help was requested (code 0), or the arguments are wrong (code 2).

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
    """Return tyro's report of a mistake without its title and the rules between its paragraphs.

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
