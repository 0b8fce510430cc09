"""Parsing of command lines: help and errors with color and boxes on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from hvdkit.errors import printable
from hvdkit.machine.terminal import on_terminal

# tyro's error report in ASCII when written to a file: a title, then paragraphs separated by rules.
_TITLE = re.compile(r" \S")
# Its report of a value that is not a number, and of an error that a config has raised.
JOINED_NUMBER = re.compile(r"-np\d+")
"""An option and its value that lack the space between them."""
_NOT_A_NUMBER = re.compile(
    r"Error parsing (?P<option>-[\w-]*)\S*: .*?(?P<kind>INT|FLOAT|float|int)\b.*?'(?P<value>.*?)'", re.DOTALL
)
_RAISED = re.compile(r"Error parsing \w+: (?P<message>.*?)\s*(?:-{3,}|For full helptext|\Z)", re.DOTALL)
_RULE = re.compile(r" *-{3,} *$")


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

    settings = (tyro.conf.DisallowNone,)  # None is a default, not a value that users pass
    cli = functools.partial(tyro.cli, kind, prog=prog, description=description, args=args, config=settings)
    out = io.StringIO()
    err = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return cli()
    except SystemExit:
        if not quiet and not _explain(err.getvalue(), prog):
            if on_terminal() and not os.environ.get("NO_COLOR"):  # https://no-color.org
                cli()  # again, in color
            _print("".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()), sys.stdout)
            _print(plain(err.getvalue()), sys.stderr)
        raise


def _explain(report: str, prog: str | None) -> bool:
    """Print what is wrong with a value, in one line; return False if the report is about something else."""
    problem = wrong_value(report)
    if problem is not None:
        _print(f"{prog or Path(sys.argv[0]).name}: {problem}\n", sys.stderr)
    return problem is not None


def _print(text: str, stream: TextIO | None) -> None:
    """Print a report, unless it is empty, or Python was started with the stream's descriptor closed."""
    if text and stream is not None:
        print(text, end="", file=stream, flush=True)


def corrected(kind: object, arguments: Sequence[str]) -> list[str] | None:
    """Return ``arguments`` with each option that does not exist replaced by the one that resembles it most.

    Args:
        kind: A config dataclass, or a union of them.
        arguments: The words after the command.

    Returns:
        The words; None if an option resembles none, or all exist.

    Example:
        >>> from hvdkit.commands.run.config import RunConfig
        >>> corrected(RunConfig, ["-n", "2", "--dryrun"])
        ['-np', '2', '--dry-run']
        >>> corrected(RunConfig, ["-np2"])
        ['-np', '2']
    """
    known = _known_options(kind, arguments)
    words = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if JOINED_NUMBER.fullmatch(word):
            words += ["-np", word.removeprefix("-np")]
            continue
        if option.startswith("-") and option.replace("_", "-") not in known and not _is_number(option):
            near = difflib.get_close_matches(option, known, 1, cutoff=0.7)
            if not near:
                return None
            option = near[0]
        words.append(f"{option}{equals}{value}")
    return None if words == list(arguments) else words


def resembling(kind: object, option: str, arguments: Sequence[str]) -> str | None:
    """Return the option of a command that ``option`` is or resembles most, or None.

    Example:
        >>> from hvdkit.commands.run.config import RunConfig
        >>> resembling(RunConfig, "-n", []), resembling(RunConfig, "--epochs", [])
        ('-np', None)
    """
    near = difflib.get_close_matches(option.replace("_", "-"), _known_options(kind, arguments), 1, cutoff=0.7)
    return near[0] if near else None


def _known_options(kind: object, arguments: Sequence[str]) -> list[str]:
    """Return the options that the help of a command, or of the subcommand in ``arguments``, names."""
    subcommand = itertools.takewhile(lambda word: not word.startswith("-"), arguments)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
        parse(kind, args=[*subcommand, "--help"])
    return re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.getvalue())


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-[\d.]+", word) is not None


def wrong_value(report: str) -> str | None:
    """Return what is wrong with the value of an option, if tyro's error report is about one that hvdkit can explain.

    Example:
        >>> wrong_value("Error parsing -np/--np: no type matching INT could be instantiated from\\n['two'].")
        '-np: got two, expected a whole number'
        >>> wrong_value("Error parsing --grace: could not convert string to float: 'abc'")
        '--grace: got abc, expected a number'
        >>> wrong_value("Error parsing RunConfig: -np: got 0, expected at\\n  least 1\\n For full helptext, ...")
        '-np: got 0, expected at least 1'
    """
    if (found := _NOT_A_NUMBER.search(report)) is not None:
        expected = "a whole number" if found["kind"].lower() == "int" else "a number"
        return printable(f"{found['option']}: got {found['value']}, expected {expected}")
    raised = _RAISED.search(report)
    return None if raised is None else printable(" ".join(raised["message"].split()))


def plain(report: str) -> str:
    """Return tyro's error report without its title and the rules between paragraphs.

    Example:
        >>> plain(" Unrecognized options\\n  Unrecognized options: --wrong\\n  ------\\n  For help, x --help\\n \\n")
        'Unrecognized options: --wrong\\nFor help, x --help\\n'
    """
    lines = [line.rstrip() for line in report.splitlines() if not _TITLE.match(line) and not _RULE.match(line)]
    return textwrap.dedent("".join(f"{line}\n" for line in lines if line))
