"""The ``hvdkit`` command.

Each subcommand is an entry in :data:`COMMANDS` with its name, a summary, an example, and the import paths of its
config and runner. The config is a keyword-only frozen dataclass whose field docs are the help texts, or a union of such
dataclasses, one per nested subcommand. Both are imported only when the command runs, so that ``hvdkit --help`` is fast
and works without TensorFlow, Horovod or MPI.

A runner is called with the config. It returns an exit code, None, or a result to print.

Exit codes: 0 success; 1 the command found a problem; 2 invalid usage, or an error whose message contains the remedy;
130 interrupted. Users can set ``HVDKIT_DEBUG=1`` to show tracebacks.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import pkgutil
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from hvdkit._version import __version__
from hvdkit.commands.parsing import JOINED_NUMBER, corrected, misplaced_options, parse
from hvdkit.errors import HvdkitError, printable, see
from hvdkit.machine.terminal import open_standard_files


class Command(NamedTuple):
    """A subcommand. ``config`` and ``runner`` are ``module:attribute`` paths, imported when it runs."""

    summary: str
    example: str
    config: str
    runner: str
    takes_program: bool = False  # pass the arguments after the options or -- to the runner unchanged
    takes_words: bool = False  # words after the first are never options, even with a leading -


COMMANDS = {
    "new": Command(
        "Write a small project that trains at once",
        "hvdkit new my_project --cluster slurm",
        config="hvdkit.commands.new:New",
        runner="hvdkit.commands.new:new",
    ),
    "run": Command(
        "Start a program on many ranks: on this machine, on several hosts, under Slurm or on Kubernetes",
        "hvdkit run -np 4 -- python train.py",
        config="hvdkit.commands.run.config:RunConfig",
        runner="hvdkit.commands.run.command:run",
        takes_program=True,
    ),
    "check": Command(
        "Compare the first steps of a program on one rank with those on several",
        "hvdkit check -np 2 train.py",
        config="hvdkit.commands.check:CheckSteps",
        runner="hvdkit.commands.check:check",
        takes_program=True,
    ),
    "bench": Command(
        "Benchmark a training step on many ranks, and profile it",
        "hvdkit bench -np 2 --model cifar10 --profile runs/profile",
        config="hvdkit.commands.measure.config:Bench",
        runner="hvdkit.commands.measure.bench:bench",
        takes_program=True,
    ),
    "doctor": Command(
        "Find problems with this machine's setup, and their remedies",
        "hvdkit doctor -np 4",
        config="hvdkit.commands.doctor:Doctor",
        runner="hvdkit.commands.doctor:doctor",
    ),
    "flight": Command(
        "Show which ranks waited for which when a job failed",
        "hvdkit flight /tmp/hvdkit-flight-20261123-120000-4242.json --trace trace.json",
        config="hvdkit.commands.flight:FlightConfig",
        runner="hvdkit.commands.flight:flight",
    ),
    "build-horovod": Command(
        "Compile and install Horovod for the installed TensorFlow",
        "hvdkit build-horovod",
        config="hvdkit.commands.build_horovod:BuildHorovod",
        runner="hvdkit.commands.build_horovod:build_horovod",
    ),
    "checkpoint": Command(
        "Inspect, verify and export checkpoints",
        "hvdkit checkpoint inspect runs/mnist",
        config="hvdkit.commands.checkpoint:Checkpoint",
        runner="hvdkit.commands.checkpoint:checkpoint",
    ),
    "data": Command(
        "Show what data files have and how many ranks they feed, find the offsets of records",
        "hvdkit data inspect clicks/ --ranks 64",
        config="hvdkit.commands.data:Data",
        runner="hvdkit.commands.data:data",
    ),
    "tune": Command(
        "Measure settings for a model on this cluster, and save the best",
        "hvdkit tune -np 2 --model cifar10 --save cifar10.json",
        config="hvdkit.commands.measure.config:Tune",
        runner="hvdkit.commands.measure.tune:tune",
    ),
    "plan": Command(
        "Plan the placement of embedding tables, or predict step times on more ranks",
        "hvdkit plan --tables items:10000000x64 users:2000000x32 --ranks 8 --optimizer adagrad",
        config="hvdkit.commands.measure.planning:PlanConfig",
        runner="hvdkit.commands.measure.planning:plan",
    ),
    "docs": Command(
        "Show a page of the documentation",
        "hvdkit docs pitfalls",
        config="hvdkit.commands.docs:Docs",
        runner="hvdkit.commands.docs:docs",
        takes_words=True,
    ),
}

_OPTION = re.compile(r"--|--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)

OPENING = "hvdkit: train TensorFlow and Keras 3 models across GPUs and hosts with Horovod."
CLOSING = "`hvdkit COMMAND --help` describes a command. HVDKIT_DEBUG=1 shows tracebacks."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``hvdkit`` command and return its exit code.

    Args:
        argv: The arguments after the program name; ``sys.argv[1:]`` by default.

    Example:
        >>> main(["--version"])
        hvdkit 0.1.0
        0
    """
    open_standard_files()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    try:
        code = _run(name, arguments[1:]) if name else _without_command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `hvdkit ... | head` closed the pipe
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get("HVDKIT_DEBUG") == "1":
            raise
        _discard_output()
        where = error.filename or "the output"
        return _fail(f"hvdkit {name}".strip(), f"cannot write {where} ({error.strerror}); free space there")
    return code


def _without_command(arguments: list[str]) -> int:
    """Print the help or the version, or report a command that does not exist."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"hvdkit {__version__}")
        return 0
    name = arguments[0]
    near = difflib.get_close_matches(name, (*COMMANDS, "--help", "--version"), 1)
    script = name if name.endswith(".py") else "train.py"
    remedy = f"choose {', '.join(COMMANDS)}; to start a program, write hvdkit run -np 2 -- python {script}"
    if near:
        remedy = f"did you mean {near[0]!r}? `hvdkit help` lists all"
    return _fail("hvdkit", f"no command {name!r}; {remedy}")


def _discard_output() -> None:
    """Write the rest of the output to the null device, or the interpreter's final flush would fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(name: str, arguments: list[str]) -> int:
    """Parse ``arguments`` into the command's config, run the command, and convert exceptions to an exit code."""
    try:
        return _dispatch(name, arguments)
    except SystemExit as stop:  # the parser has printed its help (0) or a usage error (2)
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except (HvdkitError, ValueError, ImportError) as error:
        if os.environ.get("HVDKIT_DEBUG") == "1":
            raise
        page = error.page if isinstance(error, HvdkitError) else None
        return _fail(f"hvdkit {name}", str(error) if page is None else f"{error}; {see(page)}")


def _dispatch(name: str, arguments: list[str]) -> int:
    command = COMMANDS[name]
    kind = pkgutil.resolve_name(command.config)
    program: list[list[str]] = []
    if command.takes_program:
        arguments, *program = _split_off_program(arguments, kind)
        if (problem := misplaced_options(kind, name, arguments, *program)) is not None:
            print(printable(problem, keep="\n"), file=sys.stderr, flush=True)
            return 2
    if command.takes_words and arguments and not arguments[0].startswith("-") and not {"-h", "--help"} & {*arguments}:
        arguments = ["--", *arguments]
    description = None if isinstance(kind, type) else f"{command.summary}.\n\nFor example:\n    {command.example}"
    try:
        config = parse(kind, prog=f"hvdkit {name}", description=description, args=arguments)
    except SystemExit as stop:
        if stop.code == 2:
            end = ["--", *program[0]] if program and program[0] else []
            words = corrected(kind, arguments)
            advice = f"for example: {command.example}"
            if command.takes_program:
                advice += " (options of the program itself go after its name)"
            if words is not None:
                advice = f"did you mean: {shlex.join(['hvdkit', name, *words, *end])}"
            print(advice, file=sys.stderr, flush=True)
        raise
    result = pkgutil.resolve_name(command.runner)(config, *program)
    if isinstance(result, int):
        return result
    if result is not None:
        print(result)
    return 0


def _split_off_program(arguments: list[str], kind: type) -> tuple[list[str], list[str]]:
    """Split off the program: the arguments after ``--``, or from the first one that is neither an option nor its value.

    Example:
        >>> from hvdkit.commands.run.config import RunConfig
        >>> _split_off_program(["-np", "2", "--dry-run", "python", "train.py", "--lr", "1"], RunConfig)
        (['-np', '2', '--dry-run'], ['python', 'train.py', '--lr', '1'])
    """
    names = [field.name.replace("_", "-") for field in fields(kind) if isinstance(field.default, bool)]
    switches = {"-h", "--help", *(f"--{no}{name}" for name in names for no in ("", "no-"))}
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "--":
        option = arguments[index]
        is_alone = option.replace("_", "-") in switches or JOINED_NUMBER.fullmatch(option)
        has_value = "=" not in option and not is_alone
        if has_value and index + 1 < len(arguments) and _OPTION.fullmatch(arguments[index + 1]):
            has_value = False  # the option is unknown, or its value is missing
        index += 2 if has_value else 1
    program = arguments[index:]
    return arguments[:index], program[1:] if program[:1] == ["--"] else program


def _help() -> str:
    width = max(len(name) for name in COMMANDS) + 4
    columns = max(width + 20, min(shutil.get_terminal_size().columns, 120))
    lines = [OPENING, "", "usage: hvdkit COMMAND [options]", "       hvdkit --version", "", "commands:"]
    for name, command in COMMANDS.items():
        lines += textwrap.wrap(
            command.summary, columns, initial_indent=f"  {name:{width - 2}}", subsequent_indent=" " * width
        )
    lines += ["", "examples:", *(f"  {command.example}" for command in COMMANDS.values()), "", CLOSING]
    return "\n".join(lines)


def _fail(program: str, message: str) -> int:
    """Print one line on stderr and return the exit code of an error."""
    with contextlib.suppress(OSError):  # the disk of standard error is full
        print(f"{program}: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return 2
