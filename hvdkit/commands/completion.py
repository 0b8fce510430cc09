"""``hvdkit completion``: a script that completes commands, options and file names in a shell.

Shtab writes the script from the parsers of all commands. The shell starts no Python when it completes a word; the
scripts of ``--tyro-print-completion`` do.
"""

from __future__ import annotations

import argparse
import pkgutil
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes hvdkit's commands, options and file names in a shell.

    For example:
        hvdkit completion bash > ~/.local/share/bash-completion/completions/hvdkit
        eval "$(hvdkit completion bash)"     in ~/.bashrc, without the package bash-completion
        eval "$(hvdkit completion zsh)"      in ~/.zshrc, after compinit

    See `hvdkit docs first-steps#completion`.
    """

    shell: Positional[Annotated[Literal["bash", "zsh"], arg(metavar="SHELL")]]
    """The shell: bash or zsh."""


def completion(config: Completion) -> str:
    """Return the script."""
    import shtab

    return shtab.complete(parser(), config.shell)


def parser() -> argparse.ArgumentParser:
    """Return a parser of the whole command line, with a subparser for each command."""
    import shtab

    from hvdkit.commands.cli import COMMANDS
    from hvdkit.commands.docs import pages

    root = argparse.ArgumentParser(prog="hvdkit")
    root.add_argument("-V", "--version", action="store_true", help="show the version")
    commands = root.add_subparsers()
    commands.add_parser("help", help="Describe a command").add_argument("command", choices=list(COMMANDS))
    for name, command in COMMANDS.items():
        own = _parser_of(pkgutil.resolve_name(command.config), f"hvdkit {name}")
        one = commands.add_parser(name, parents=[own], add_help=False, help=command.summary)
        if name == "docs":
            next(action for action in one._actions if action.dest == "page").choices = list(pages())
        if command.takes_program:
            rest: Any = one.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
            rest.complete = shtab.FILE
    return root


def _parser_of(kind: Any, prog: str) -> argparse.ArgumentParser:
    """Return the argparse parser of a command's config."""
    import tyro

    with warnings.catch_warnings():
        # Deprecated since tyro 1.0, because tyro itself parses without argparse; nothing else describes the options.
        warnings.simplefilter("ignore", DeprecationWarning)
        parser: Any = tyro.extras.get_parser(kind, prog=prog, config=(tyro.conf.DisallowNone,))
    for action in parser._actions:
        if isinstance(action.choices, dict):  # subcommands; the first line of each docstring is its summary
            for subcommand in action.choices.values():
                subcommand.description = (subcommand.description or "").strip().partition("\n")[0]
        elif action.choices is not None:  # None is the default of an optional choice
            action.choices = [choice for choice in action.choices if choice != "None"]
    return parser
