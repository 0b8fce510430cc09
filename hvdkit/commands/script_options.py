"""Options of a script that were written before it: ``hvdkit run -np 2 --epochs 3 train.py``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.commands.parsing import resembling

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def misplaced_options(
    kind: type[DataclassInstance], name: str, arguments: Sequence[str], program: Sequence[str]
) -> str | None:
    """Return the message about options before a script that are not those of the command.

    Args:
        kind: the command's config dataclass.
        name: the command, such as ``run``.
        arguments: the words before the program.
        program: the words of the program, which may be empty if an option was taken to have the script as its value.

    Returns:
        Two lines, with the command to write; None if there are no such options, if they resemble those of the command,
        or if the program is not a Python script.

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
    if not moved or script is None or (not _mentions(script, first) and resembling(kind, first, arguments)):
        return None
    if "-np" in command[:-1] and "-np" not in own:
        index = command.index("-np")
        own += command[index : index + 2]
        del command[index : index + 2]
    if name == "run" and command[0] == script:
        command.insert(0, "python")
    own = [resembling(kind, word, own) or word if word.startswith("-") else word for word in own]
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
