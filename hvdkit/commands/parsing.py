"""Parsing of command lines, and proposals for options that are misspelled or misplaced.

Help and errors have color and boxes on a terminal, and are plain lines everywhere else.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import itertools
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hvdkit.errors import printable
from hvdkit.machine.terminal import on_terminal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

JOINED_NUMBER = re.compile(r"-np\d+")
"""An option and its value that lack the space between them."""
# tyro's error report in ASCII when written to a file: a title, then paragraphs separated by rules.
_TITLE = re.compile(r" \S")
_RULE = re.compile(r" *-{3,} *$")
# Its report of a value that is not a number, and of an error that a config has raised.
_NOT_A_NUMBER = re.compile(
    r"Error parsing (?P<option>-[\w-]*)\S*: .*?(?P<kind>INT|FLOAT|float|int)\b.*?'(?P<value>.*?)'", re.DOTALL
)
_RAISED = re.compile(r"Error parsing \w+: (?P<message>.*?)\s*(?:-{3,}|For full helptext|\Z)", re.DOTALL)


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
        if quiet:
            raise
        problem = wrong_value(err.getvalue())
        if problem is not None:
            _print(f"{prog or Path(sys.argv[0]).name}: {problem}\n", sys.stderr)
            raise
        if on_terminal() and not os.environ.get("NO_COLOR"):  # https://no-color.org
            cli()  # again, in color
        _print("".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()), sys.stdout)
        _print(plain(err.getvalue()), sys.stderr)
        raise


def _print(text: str, stream: TextIO | None) -> None:
    """Print a report, unless it is empty, or Python was started with the stream's descriptor closed."""
    if text and stream is not None:
        print(text, end="", file=stream, flush=True)


def corrected(kind: object, arguments: Sequence[str]) -> list[str] | None:
    """Return ``arguments`` with each option that does not exist replaced by the one that resembles it most.

    Return None if an option resembles none, or all exist.

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
        is_number = re.fullmatch(r"-[\d.]+", option) is not None
        if option.startswith("-") and option.replace("_", "-") not in known and not is_number:
            near = difflib.get_close_matches(option, known, 1, cutoff=0.7)
            if not near:
                return None
            option = near[0]
        words.append(f"{option}{equals}{value}")
    return None if words == list(arguments) else words


def misplaced_options(
    kind: type[DataclassInstance], name: str, arguments: Sequence[str], program: Sequence[str]
) -> str | None:
    """Return the message about options of a script that were written before it: ``run -np 2 --epochs 3 train.py``.

    Return None if there are no such options, if they resemble those of the command ``name``, or if the program is not a
    Python script. The program may be empty, if an option was taken to have the script as its value.

    Example:
        >>> from hvdkit.commands.run.config import RunConfig
        >>> print(misplaced_options(RunConfig, "run", ["-np", "2", "--epochs", "3"], ["train.py"]))
        hvdkit run: no option --epochs; if it is one of train.py, it goes after that name
        write: hvdkit run -np 2 -- python train.py --epochs 3
    """
    known = {"--help", *(f"--{no}{field.name.replace('_', '-')}" for field in fields(kind) for no in ("", "no-"))}
    own: list[str] = []
    moved: list[str] = []
    command = list(program)
    first = ""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        option = word.partition("=")[0].replace("_", "-")
        if not option.startswith("--") or option in known:
            own.append(word)
            continue
        first = first or word.partition("=")[0]
        moved.append(word)
        if "=" in word or not rest or rest[0].startswith("-"):
            continue
        if _is_script(rest[0]) or rest[0].startswith("python"):  # the option has no value
            command = [*rest, *command]
            rest = []
        else:
            moved.append(rest.pop(0))
    script = next((word for word in command if _is_script(word)), None)
    if not moved or script is None or (not _mentions(script, first) and _resembling(kind, first, arguments)):
        return None
    if "-np" in command[:-1] and "-np" not in own:
        index = command.index("-np")
        own += command[index : index + 2]
        del command[index : index + 2]
    if name == "run" and command[0] == script:
        command.insert(0, "python")
    own = [_resembling(kind, word, own) or word if word.startswith("-") else word for word in own]
    return (
        f"hvdkit {name}: no option {first}; if it is one of {script}, it goes after that name\n"
        f"write: {shlex.join(['hvdkit', name, *own, '--', *command, *moved])}"
    )


def _is_script(word: str) -> bool:
    return word.endswith(".py")


def _mentions(script: str, option: str) -> bool:
    """Return whether a script's text has an option."""
    path = Path(script)
    return path.is_file() and option.lstrip("-") in path.read_text(encoding="utf-8", errors="replace")


def _resembling(kind: object, option: str, arguments: Sequence[str]) -> str | None:
    """Return the option of a command that ``option`` is or resembles most, or None."""
    near = difflib.get_close_matches(option.replace("_", "-"), _known_options(kind, arguments), 1, cutoff=0.7)
    return near[0] if near else None


def _known_options(kind: object, arguments: Sequence[str]) -> list[str]:
    """Return the options that the help of a command, or of the subcommand in ``arguments``, names."""
    subcommand = itertools.takewhile(lambda word: not word.startswith("-"), arguments)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
        parse(kind, args=[*subcommand, "--help"])
    return re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.getvalue())


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
